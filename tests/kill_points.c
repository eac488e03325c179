/* Preloaded into a program: before each of its calls that change what is below KILL_POINTS_ROOT, that directory is copied to KILL_POINTS_IMAGES/N.
 *
 * With KILL_POINTS_SIGNAL=N there are no copies: a SIGTERM comes to the process before its Nth such call, from 0, and KILL_POINTS_SENT is set.
 *
 * A copy is what a kill -9 at that moment leaves: what a process wrote stays in the page cache, the call that would follow does not happen. All
 * processes that share the images take turns, the call included, so that a copy is of one moment.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/aio_abi.h>
#include <signal.h>
#include <spawn.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

static __thread int inside;

static const char* setting(const char* name) { return getenv(name) ? getenv(name) : "/nowhere"; }

static int is_below(const char* path) {
  const char* root = setting("KILL_POINTS_ROOT");
  const size_t length = strlen(root);
  return strncmp(path, root, length) == 0 && (path[length] == '/' || path[length] == '\0');
}

static int watched_descriptor(int descriptor) {
  char link[64], path[PATH_MAX];
  snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
  const ssize_t length = readlink(link, path, sizeof path - 1);
  if (length < 0) return 0;
  path[length] = '\0';
  return is_below(path);
}

static int watched(int directory, const char* path) {
  char whole[PATH_MAX];
  if (path[0] == '/') return is_below(path);
  if (directory != AT_FDCWD) return watched_descriptor(directory);
  if (getcwd(whole, sizeof whole) == NULL) return 0;
  return is_below(whole);
}

/* Takes the copy; returns what `after` is to be given. */
static int before(int watch) {
  if (inside || !watch) return -1;
  if (getenv("KILL_POINTS_SIGNAL") != NULL) {
    static int seen;
    if (seen++ == atoi(getenv("KILL_POINTS_SIGNAL"))) {
      setenv("KILL_POINTS_SENT", "1", 1);
      kill(getpid(), SIGTERM);
    }
    return -1;
  }
  inside = 1;
  int (*real_open)(const char*, int, ...) = dlsym(RTLD_NEXT, "open");
  char path[PATH_MAX], count[32] = {0};
  snprintf(path, sizeof path, "%s/count", setting("KILL_POINTS_IMAGES"));
  const int lock = real_open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (lock < 0 || flock(lock, LOCK_EX) != 0) abort();
  if (pread(lock, count, sizeof count - 1, 0) < 0) abort();
  snprintf(path, sizeof path, "%s/%06d", setting("KILL_POINTS_IMAGES"), atoi(count));
  snprintf(count, sizeof count, "%d", atoi(count) + 1);
  ssize_t (*real_pwrite)(int, const void*, size_t, off_t) = dlsym(RTLD_NEXT, "pwrite");
  if (real_pwrite(lock, count, strlen(count), 0) < 0) abort();
  char* arguments[] = {"cp", "-a", (char*)setting("KILL_POINTS_ROOT"), path, NULL};
  char* environment[] = {"PATH=/usr/bin:/bin", NULL};
  pid_t child;
  int status = 0;
  if (posix_spawnp(&child, "cp", NULL, NULL, arguments, environment) != 0 || waitpid(child, &status, 0) != child || status != 0) abort();
  return lock;
}

static void after(int lock) {
  if (lock < 0) return;
  close(lock);
  inside = 0;
}

#define CALL(type, name, parameters, watch, ...)      \
  type name parameters {                              \
    type(*real) parameters = dlsym(RTLD_NEXT, #name); \
    const int lock = before(!inside && (watch));      \
    const type result = real(__VA_ARGS__);            \
    after(lock);                                      \
    return result;                                    \
  }

#define OPEN(name)                                                                                     \
  int name(const char* path, int flags, ...) {                                                         \
    va_list list;                                                                                      \
    va_start(list, flags);                                                                             \
    const int mode = (flags & (O_CREAT | O_TMPFILE)) != 0 ? va_arg(list, int) : 0;                     \
    va_end(list);                                                                                      \
    int (*real)(const char*, int, ...) = dlsym(RTLD_NEXT, #name);                                      \
    const int lock = before(!inside && (flags & (O_CREAT | O_TRUNC)) != 0 && watched(AT_FDCWD, path)); \
    const int result = real(path, flags, mode);                                                        \
    after(lock);                                                                                       \
    return result;                                                                                     \
  }

OPEN(open)
OPEN(open64)
CALL(ssize_t, write, (int fd, const void* data, size_t count), watched_descriptor(fd), fd, data, count)
CALL(ssize_t, writev, (int fd, const struct iovec* parts, int count), watched_descriptor(fd), fd, parts, count)
CALL(ssize_t, pwrite, (int fd, const void* data, size_t count, off_t at), watched_descriptor(fd), fd, data, count, at)
CALL(ssize_t, pwrite64, (int fd, const void* data, size_t count, off64_t at), watched_descriptor(fd), fd, data, count, at)
CALL(int, ftruncate, (int fd, off_t size), watched_descriptor(fd), fd, size)
CALL(int, ftruncate64, (int fd, off64_t size), watched_descriptor(fd), fd, size)
CALL(int, fallocate, (int fd, int mode, off_t at, off_t count), watched_descriptor(fd), fd, mode, at, count)
CALL(int, fallocate64, (int fd, int mode, off64_t at, off64_t count), watched_descriptor(fd), fd, mode, at, count)
CALL(int, fsync, (int fd), watched_descriptor(fd), fd)
CALL(int, fdatasync, (int fd), watched_descriptor(fd), fd)
CALL(int, fchmod, (int fd, mode_t mode), watched_descriptor(fd), fd, mode)
CALL(int, chmod, (const char* path, mode_t mode), watched(AT_FDCWD, path), path, mode)
CALL(int, mkdir, (const char* path, mode_t mode), watched(AT_FDCWD, path), path, mode)
CALL(int, rmdir, (const char* path), watched(AT_FDCWD, path), path)
CALL(int, unlink, (const char* path), watched(AT_FDCWD, path), path)
CALL(int, unlinkat, (int fd, const char* path, int flags), watched(fd, path), fd, path, flags)
CALL(int, rename, (const char* from, const char* to), watched(AT_FDCWD, to), from, to)
CALL(int, renameat, (int fd, const char* from, int other, const char* to), watched(other, to), fd, from, other, to)
CALL(int, renameat2, (int fd, const char* from, int other, const char* to, unsigned flags), watched(other, to), fd, from, other, to, flags)

/* io_submit, which libc has no function for. The others are passed on with as many arguments as a system call can have. */
long syscall(long number, ...) {
  long (*real)(long, ...) = dlsym(RTLD_NEXT, "syscall");
  long arguments[6];
  va_list list;
  va_start(list, number);
  for (int i = 0; i < 6; i++) arguments[i] = va_arg(list, long);
  va_end(list);
  struct iocb** blocks = (struct iocb**)arguments[2];
  const int lock = before(!inside && number == SYS_io_submit && arguments[1] > 0 && watched_descriptor((int)blocks[0]->aio_fildes));
  const long result = real(number, arguments[0], arguments[1], arguments[2], arguments[3], arguments[4], arguments[5]);
  const int error = errno;
  after(lock);
  errno = error;
  return result;
}
