#!/usr/bin/env bash
# Installs redis-server and Prometheus for the tests that talk to real ones. Never fails: those tests skip without them.
set -uo pipefail
sudo=
[ "$(id -u)" = 0 ] || sudo="sudo -n"

install() { # PROGRAM PACKAGE
    command -v "$1" >/dev/null && return
    echo "== installing $2"
    { $sudo apt-get update -qq && $sudo apt-get install -y -qq --no-install-recommends "$2"; } >/dev/null 2>&1 </dev/null ||
        echo "== $2 could not be installed: the tests that need it will be skipped"
}

install redis-server redis-server
install promtool prometheus
exit 0
