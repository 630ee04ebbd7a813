/* A disk that fails when it is told to: preloaded, it stands before the calls with which segments are read and written,
   and the journal is written. What happens is in the file that DISK_FAULT names: eio, enospc, erofs, slow, hang (nothing
   returns until it is another fault), hang-writes (reads do), and anything else for a good disk. The journal only hangs. */

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

static void told(char *what, size_t size) {
    memset(what, 0, size);
    const char *name = getenv("DISK_FAULT");
    int file = name ? open(name, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0) return;
    if (read(file, what, size - 1) < 0) what[0] = 0;
    close(file);
}

static int hangs(const char *what, int is_write) {
    return !strcmp(what, "hang") || (is_write && !strcmp(what, "hang-writes"));
}

static int fault(int fd, int is_write) {
    char link[64], path[4096], what[16];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    int is_segment = strstr(path, "/rank-") != NULL;
    if (!is_segment && !strstr(path, "/sessions.sqlite")) return 0;
    for (told(what, sizeof what); hangs(what, is_write); told(what, sizeof what)) usleep(50000);
    if (!is_segment) return 0;
    if (!strncmp(what, "eio", 3)) return EIO;
    if (is_write && !strncmp(what, "enospc", 6)) return ENOSPC;
    if (is_write && !strncmp(what, "erofs", 5)) return EROFS;
    if (!strncmp(what, "slow", 4)) usleep(2000000);
    return 0;
}

#define GUARDED(type, name, is_write, parameters, arguments)                    \
    type name parameters {                                                     \
        static type(*real) parameters;                                         \
        if (!real) real = (type(*) parameters)dlsym(RTLD_NEXT, #name);         \
        int error = fault(fd, is_write);                                       \
        if (error) {                                                           \
            errno = error;                                                     \
            return -1;                                                         \
        }                                                                      \
        return real arguments;                                                 \
    }

#define ONE (int fd, const void *piece, size_t count, off64_t at)
#define VECTOR (int fd, const struct iovec *pieces, int count, off64_t at)
#define VECTOR2 (int fd, const struct iovec *pieces, int count, off64_t at, int flags)

GUARDED(ssize_t, preadv, 0, VECTOR, (fd, pieces, count, at))
GUARDED(ssize_t, preadv64, 0, VECTOR, (fd, pieces, count, at))
GUARDED(ssize_t, preadv2, 0, VECTOR2, (fd, pieces, count, at, flags))
GUARDED(ssize_t, preadv64v2, 0, VECTOR2, (fd, pieces, count, at, flags))
GUARDED(ssize_t, pwrite, 1, ONE, (fd, piece, count, at))
GUARDED(ssize_t, pwrite64, 1, ONE, (fd, piece, count, at))
GUARDED(ssize_t, pwritev, 1, VECTOR, (fd, pieces, count, at))
GUARDED(ssize_t, pwritev64, 1, VECTOR, (fd, pieces, count, at))
GUARDED(ssize_t, pwritev2, 1, VECTOR2, (fd, pieces, count, at, flags))
GUARDED(ssize_t, pwritev64v2, 1, VECTOR2, (fd, pieces, count, at, flags))
GUARDED(int, fdatasync, 1, (int fd), (fd))
GUARDED(int, fsync, 1, (int fd), (fd))
