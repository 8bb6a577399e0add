/* Lets the calls of the C library fail that change files in a folder, or that allocate: preloaded (LD_PRELOAD), it acts
   once `fail_calls` was called. Python and Rust write with these calls alike, so that a fault comes where a real disk or
   a full memory gives it. Linux. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

enum { CREATE = 1, WRITE = 2, MKDIR = 4, RENAME = 8, LINK = 16, REMOVE = 32, FSYNC = 64, CHMOD = 128, UTIME = 256,
       LOCK = 512, READ = 1024, ALLOCATE = 2048, REPLACE = 4096 };

static char below[PATH_MAX];
static unsigned which;
static long first, last;
static int code, paused;
static size_t least;
static long *seen; /* shared with the process that forked this one */

__attribute__((constructor)) static void begin(void) {
    seen = mmap(NULL, sizeof *seen, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
}

/* From now on, the calls of the kinds `calls` below `folder` numbered from..to (from 0) fail with `error`; an allocation
   counts where it is of `size` bytes or more. */
void fail_calls(const char *folder, unsigned calls, long from, long to, int error, size_t size) {
    strncpy(below, folder, sizeof below - 1);
    first = from, last = to, code = error, least = size, *seen = 0;
    which = calls;
}

/* Let no call fail until this is called with 0. */
void pause_failing(int on) { paused = on; }

long calls_seen(void) { return *seen; }

static int counted(void) {
    long number = __atomic_fetch_add(seen, 1, __ATOMIC_SEQ_CST);
    if (number < first || number > last) return 0;
    errno = code;
    return 1;
}

static int inside(const char *path) {
    size_t length = strlen(below);
    return !strncmp(path, below, length) && (path[length] == '/' || !path[length]);
}

static int fails(unsigned kind, int folder, const char *path) {
    char whole[2 * PATH_MAX + 2], of[64];
    if (paused || !(which & kind) || !path) return 0;
    if (path[0] == '/') return inside(path) && counted();
    if (folder == AT_FDCWD) {
        if (!getcwd(whole, PATH_MAX)) return 0;
    } else {
        snprintf(of, sizeof of, "/proc/self/fd/%d", folder);
        ssize_t length = readlink(of, whole, PATH_MAX);
        if (length < 0) return 0;
        whole[length] = 0;
    }
    size_t length = strlen(whole);
    snprintf(whole + length, sizeof whole - length, "/%s", path);
    return inside(whole) && counted();
}

static int fails_fd(unsigned kind, int fd) {
    char whole[PATH_MAX + 1], of[64];
    if (paused || !(which & kind)) return 0;
    snprintf(of, sizeof of, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(of, whole, PATH_MAX);
    if (length < 0) return 0;
    whole[length] = 0;
    return inside(whole) && counted();
}

#define REAL(type, name, ...) static type (*real)(__VA_ARGS__); if (!real) real = dlsym(RTLD_NEXT, #name)
#define PATH_CALL(kind, name, parameters, folder, path, ...)                                                            \
    int name parameters { REAL(int, name, ); if (fails(kind, folder, path)) return -1; return ((int (*) parameters)real)(__VA_ARGS__); }
#define FD_CALL(type, kind, name, parameters, fd, ...)                                                                  \
    type name parameters { REAL(type, name, ); if (fails_fd(kind, fd)) return -1; return ((type (*) parameters)real)(__VA_ARGS__); }

#define OPEN(name, parameters, folder, path, ...)                                                                       \
    int name parameters {                                                                                               \
        REAL(int, name, );                                                                                              \
        mode_t mode = 0;                                                                                                \
        if (flags & (O_CREAT | __O_TMPFILE)) { va_list rest; va_start(rest, flags); mode = va_arg(rest, mode_t); va_end(rest); } \
        unsigned kind = flags & (O_CREAT | O_WRONLY | O_RDWR) ? CREATE : flags & O_DIRECTORY ? 0 : READ;                 \
        if (kind && fails(kind, folder, path)) return -1;                                                               \
        return ((int (*)())real)(__VA_ARGS__, flags, mode);                                                             \
    }
OPEN(open, (const char *path, int flags, ...), AT_FDCWD, path, path)
OPEN(open64, (const char *path, int flags, ...), AT_FDCWD, path, path)
OPEN(openat, (int folder, const char *path, int flags, ...), folder, path, folder, path)
OPEN(openat64, (int folder, const char *path, int flags, ...), folder, path, folder, path)

FD_CALL(ssize_t, WRITE, write, (int fd, const void *data, size_t n), fd, fd, data, n)
FD_CALL(ssize_t, WRITE, pwrite, (int fd, const void *data, size_t n, off_t at), fd, fd, data, n, at)
FD_CALL(ssize_t, WRITE, pwrite64, (int fd, const void *data, size_t n, off64_t at), fd, fd, data, n, at)
FD_CALL(ssize_t, WRITE, writev, (int fd, const void *parts, int n), fd, fd, parts, n)
FD_CALL(ssize_t, WRITE, sendfile, (int fd, int from, off_t *at, size_t n), fd, fd, from, at, n)
FD_CALL(ssize_t, WRITE, sendfile64, (int fd, int from, off64_t *at, size_t n), fd, fd, from, at, n)
FD_CALL(ssize_t, WRITE, copy_file_range, (int from, off64_t *a, int fd, off64_t *b, size_t n, unsigned f), fd, from, a, fd, b, n, f)
FD_CALL(int, WRITE, ftruncate, (int fd, off_t size), fd, fd, size)
FD_CALL(int, WRITE, ftruncate64, (int fd, off64_t size), fd, fd, size)
FD_CALL(int, FSYNC, fsync, (int fd), fd, fd)
FD_CALL(int, FSYNC, fdatasync, (int fd), fd, fd)
FD_CALL(int, CHMOD, fchmod, (int fd, mode_t mode), fd, fd, mode)
FD_CALL(int, LOCK, flock, (int fd, int how), fd, fd, how)

PATH_CALL(WRITE, truncate, (const char *path, off_t size), AT_FDCWD, path, path, size)
PATH_CALL(WRITE, truncate64, (const char *path, off64_t size), AT_FDCWD, path, path, size)
PATH_CALL(MKDIR, mkdir, (const char *path, mode_t mode), AT_FDCWD, path, path, mode)
PATH_CALL(MKDIR, mkdirat, (int folder, const char *path, mode_t mode), folder, path, folder, path, mode)
PATH_CALL(LINK, link, (const char *old, const char *path), AT_FDCWD, path, old, path)
PATH_CALL(LINK, linkat, (int a, const char *old, int folder, const char *path, int f), folder, path, a, old, folder, path, f)
PATH_CALL(LINK, symlink, (const char *old, const char *path), AT_FDCWD, path, old, path)
PATH_CALL(REMOVE, unlink, (const char *path), AT_FDCWD, path, path)
PATH_CALL(REMOVE, unlinkat, (int folder, const char *path, int f), folder, path, folder, path, f)
PATH_CALL(REMOVE, rmdir, (const char *path), AT_FDCWD, path, path)
PATH_CALL(CHMOD, chmod, (const char *path, mode_t mode), AT_FDCWD, path, path, mode)
PATH_CALL(CHMOD, fchmodat, (int folder, const char *path, mode_t mode, int f), folder, path, folder, path, mode, f)
PATH_CALL(UTIME, utimensat, (int folder, const char *path, const struct timespec t[2], int f), folder, path, folder, path, t, f)

/* REPLACE is the renaming of a folder, the kind of renaming that file systems differ in. */
static int rename_fails(const char *old, const char *path) {
    struct stat about;
    if (fails(RENAME, AT_FDCWD, path)) return 1;
    return !paused && (which & REPLACE) && !lstat(old, &about) && S_ISDIR(about.st_mode) && fails(REPLACE, AT_FDCWD, path);
}
int rename(const char *old, const char *path) {
    REAL(int, rename, const char *, const char *);
    return rename_fails(old, path) ? -1 : real(old, path);
}
int renameat(int a, const char *old, int b, const char *path) {
    REAL(int, renameat, int, const char *, int, const char *);
    return rename_fails(old, path) ? -1 : real(a, old, b, path);
}

int posix_memalign(void **at, size_t alignment, size_t size) {
    REAL(int, posix_memalign, void **, size_t, size_t);
    if (!paused && (which & ALLOCATE) && size >= least && counted()) return ENOMEM;
    return real(at, alignment, size);
}
