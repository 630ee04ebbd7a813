#!/usr/bin/env bash
# Installs the programs that tests run: redis-server, Prometheus, Chromium, a C compiler, and more. Without one its tests fail.
set -uo pipefail
sudo=
[ "$(id -u)" = 0 ] || sudo="sudo -n"

install() { # PROGRAM PACKAGE
    command -v "$1" >/dev/null && return
    echo "== installing $2"
    { $sudo apt-get update -qq && $sudo apt-get install -y -qq --no-install-recommends "$2"; } >/dev/null 2>&1 </dev/null ||
        echo "== $2 could not be installed: the tests that need it will fail"
}

install redis-server redis-server
install promtool prometheus
install chromium chromium
install cc gcc
install systemd-analyze systemd
install mmdebstrap mmdebstrap
exit 0
