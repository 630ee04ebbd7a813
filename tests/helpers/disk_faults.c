/* A disk that fails when it is told to: preloaded, it stands before the calls with which segments are read and written.
   What happens is in the file that DISK_FAULT names: eio, enospc, erofs or slow, and anything else for a good disk. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static int fault(int fd, int is_write) {
    char link[64], path[4096], what[16] = "";
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    if (!strstr(path, "/rank-")) return 0;
    const char *name = getenv("DISK_FAULT");
    int file = name ? open(name, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0) return 0;
    if (read(file, what, sizeof what - 1) < 0) what[0] = 0;
    close(file);
    if (!strncmp(what, "eio", 3)) return EIO;
    if (is_write && !strncmp(what, "enospc", 6)) return ENOSPC;
    if (is_write && !strncmp(what, "erofs", 5)) return EROFS;
    if (!strncmp(what, "slow", 4)) usleep(2000000);
    return 0;
}

#define GUARDED(name, is_write, parameters, arguments)                          \
    ssize_t name parameters {                                                  \
        static ssize_t(*real) parameters;                                      \
        if (!real) real = (ssize_t(*) parameters)dlsym(RTLD_NEXT, #name);      \
        int error = fault(fd, is_write);                                       \
        if (error) {                                                           \
            errno = error;                                                     \
            return -1;                                                         \
        }                                                                      \
        return real arguments;                                                 \
    }

#define VECTOR (int fd, const struct iovec *pieces, int count, off64_t at)
#define VECTOR2 (int fd, const struct iovec *pieces, int count, off64_t at, int flags)

GUARDED(preadv, 0, VECTOR, (fd, pieces, count, at))
GUARDED(preadv64, 0, VECTOR, (fd, pieces, count, at))
GUARDED(preadv2, 0, VECTOR2, (fd, pieces, count, at, flags))
GUARDED(preadv64v2, 0, VECTOR2, (fd, pieces, count, at, flags))
GUARDED(pwritev, 1, VECTOR, (fd, pieces, count, at))
GUARDED(pwritev64, 1, VECTOR, (fd, pieces, count, at))
GUARDED(pwritev2, 1, VECTOR2, (fd, pieces, count, at, flags))
GUARDED(pwritev64v2, 1, VECTOR2, (fd, pieces, count, at, flags))
