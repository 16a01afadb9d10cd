/* Faults on demand, for LD_PRELOAD: a slow or full disk below one folder, and a clock that jumps.
 *
 * FAULT_CONTROL names a file of `struct faults`, mapped for as long as the process lives: whoever writes it switches
 * faults on and off at once. FAULT_PATH is a part of the paths that faults of the disk concern.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

struct faults {
    int64_t delay_ms;     /* of each read, write and flush */
    int64_t write_errno;  /* of each write and flush; 0: none */
    int64_t clock_s;      /* added to what the wall clock says */
    int64_t hits;         /* reads, writes and flushes that were met, of all processes */
};

static volatile struct faults none;
static volatile struct faults *faults = &none;
static const char *path_part = "";

__attribute__((constructor)) static void map_control(void) {
    const char *path = getenv("FAULT_CONTROL");
    /* A copy: a process that changes its title writes over its environment. */
    if (getenv("FAULT_PATH") != NULL) path_part = strdup(getenv("FAULT_PATH"));
    if (path == NULL || path_part == NULL || *path_part == 0) return;
    int file = open(path, O_RDWR | O_CLOEXEC);
    if (file < 0) return;
    void *mapped = mmap(NULL, sizeof(struct faults), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (mapped != MAP_FAILED) faults = mapped;
    close(file);
}

static void *real(const char *name) {
    void *found = dlsym(RTLD_NEXT, name);
    if (found == NULL) abort();
    return found;
}

/* Whether this file is concerned, after the delay; *error is what to fail with. */
static int meet(int file, int is_write, int *error) {
    int64_t delay = faults->delay_ms, code = is_write ? faults->write_errno : 0;
    *error = 0;
    if (delay == 0 && code == 0) return 0;
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    if (strstr(path, path_part) == NULL) return 0;
    __atomic_fetch_add((int64_t *)&faults->hits, 1, __ATOMIC_RELAXED);
    if (delay > 0) {
        struct timespec pause = {delay / 1000, delay % 1000 * 1000000};
        nanosleep(&pause, NULL);
    }
    *error = (int)code;
    return code != 0;
}

#define FAULTY(result, name, is_write, parameters, arguments)              \
    result name parameters {                                               \
        static result(*next) parameters;                                   \
        if (next == NULL) next = (result(*) parameters)real(#name);        \
        int error;                                                         \
        if (meet(file, is_write, &error)) {                                \
            errno = error;                                                 \
            return -1;                                                     \
        }                                                                  \
        return next arguments;                                             \
    }

FAULTY(ssize_t, pwrite, 1, (int file, const void *data, size_t size, off_t at), (file, data, size, at))
FAULTY(ssize_t, pwrite64, 1, (int file, const void *data, size_t size, off64_t at), (file, data, size, at))
FAULTY(ssize_t, pwritev, 1, (int file, const struct iovec *parts, int count, off_t at), (file, parts, count, at))
FAULTY(ssize_t, pwritev64, 1, (int file, const struct iovec *parts, int count, off64_t at), (file, parts, count, at))
FAULTY(ssize_t, pwritev2, 1, (int file, const struct iovec *parts, int count, off_t at, int flags),
       (file, parts, count, at, flags))
FAULTY(ssize_t, pwritev64v2, 1, (int file, const struct iovec *parts, int count, off64_t at, int flags),
       (file, parts, count, at, flags))
FAULTY(ssize_t, write, 1, (int file, const void *data, size_t size), (file, data, size))
FAULTY(ssize_t, pread, 0, (int file, void *data, size_t size, off_t at), (file, data, size, at))
FAULTY(ssize_t, pread64, 0, (int file, void *data, size_t size, off64_t at), (file, data, size, at))
FAULTY(ssize_t, preadv, 0, (int file, const struct iovec *parts, int count, off_t at), (file, parts, count, at))
FAULTY(ssize_t, preadv64, 0, (int file, const struct iovec *parts, int count, off64_t at), (file, parts, count, at))
FAULTY(ssize_t, preadv2, 0, (int file, const struct iovec *parts, int count, off_t at, int flags),
       (file, parts, count, at, flags))
FAULTY(ssize_t, preadv64v2, 0, (int file, const struct iovec *parts, int count, off64_t at, int flags),
       (file, parts, count, at, flags))
FAULTY(int, fsync, 1, (int file), (file))
FAULTY(int, fdatasync, 1, (int file), (file))

int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*next)(clockid_t, struct timespec *);
    if (next == NULL) next = (int (*)(clockid_t, struct timespec *))real("clock_gettime");
    int result = next(clock, now);
    if (result == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += faults->clock_s;
    return result;
}

int gettimeofday(struct timeval *now, void *zone) {
    (void)zone;
    struct timespec exact;
    int result = clock_gettime(CLOCK_REALTIME, &exact);
    now->tv_sec = exact.tv_sec;
    now->tv_usec = exact.tv_nsec / 1000;
    return result;
}

time_t time(time_t *into) {
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    if (into != NULL) *into = exact.tv_sec;
    return exact.tv_sec;
}

/* Deadlines by the wall clock mean the clock that the process sees. Those by the monotonic one are small numbers. */
static struct timespec true_deadline(const struct timespec *seen) {
    struct timespec deadline = *seen;
    if (deadline.tv_sec > 1000000000) deadline.tv_sec -= faults->clock_s;
    return deadline;
}

int pthread_cond_timedwait(pthread_cond_t *condition, pthread_mutex_t *mutex, const struct timespec *until) {
    static int (*next)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
    /* The first version's is for conditions of another size. */
    if (next == NULL) next = dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2");
    if (next == NULL) next = real("pthread_cond_timedwait");
    struct timespec deadline = true_deadline(until);
    return next(condition, mutex, &deadline);
}

int sem_timedwait(sem_t *semaphore, const struct timespec *until) {
    static int (*next)(sem_t *, const struct timespec *);
    if (next == NULL) next = real("sem_timedwait");
    struct timespec deadline = true_deadline(until);
    return next(semaphore, &deadline);
}
