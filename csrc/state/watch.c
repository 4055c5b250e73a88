/* The watch thread of a rank: every 100 ms it beats in its own page and looks at the others. A rank
 * is lost when its pidfd says that the process ended, or when its beat has stood still for
 * SLIDE_STALL seconds. Those seconds are counted in ticks of this thread, not read from a clock:
 * when the whole job was stopped (Ctrl-Z, a suspended machine) no tick passed and nobody is
 * accused; a late tick of our own starts all counts anew. Ranks that are threads of this process
 * (tests) have no pidfd of their own; they do beat. */
#define _GNU_SOURCE 1
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/env.h"
#include "base/mem.h"
#include "base/thread.h"
#include "state/host.h"

#define TICK_MS 100
#define LATE_SECONDS 1.0

struct slide_watch {
    struct slide_host *host;
    struct slide_thread thread;
    int pidfd[SLIDE_RANKS_MAX]; /* -1: none */
    int pid[SLIDE_RANKS_MAX];
    uint32_t beat[SLIDE_RANKS_MAX];
    int still[SLIDE_RANKS_MAX]; /* ticks without a beat */
    int limit;                  /* ticks; 0: no limit */
    slide_word stop;
    int stop_pipe[2];
};

static void lose(struct slide_watch *watch, int r, const char *how)
{
    struct slide_err err = SLIDE_ERR_INIT;
    err.rank = r;
    slide_err_set(&err, SLIDE_EPEER, "rank %d (pid %d) %s", r, watch->pid[r], how);
    slide_host_post(watch->host, &err);
}

static void look(struct slide_watch *watch, int late)
{
    struct slide_host *host = watch->host;
    for (int r = 0; r < host->world; r++) {
        struct slide_rank_page *page = &host->header->rank[r];
        if (r == host->rank || slide_word_get(&page->left))
            continue;
        if (watch->pidfd[r] >= 0) {
            struct pollfd p = {.fd = watch->pidfd[r], .events = POLLIN};
            /* `left` again: it may have been set and the process ended since we looked. */
            if (poll(&p, 1, 0) == 1 && !slide_word_get(&page->left)) {
                lose(watch, r, "died");
                continue;
            }
        }
        uint32_t beat = slide_word_get(&page->beat);
        if (beat != watch->beat[r] || late) {
            watch->beat[r] = beat;
            watch->still[r] = 0;
        } else if (watch->limit && ++watch->still[r] >= watch->limit) {
            char how[96];
            snprintf(how, sizeof how, "has shown no sign of life for %d s (stopped or stuck)",
                     watch->limit * TICK_MS / 1000);
            lose(watch, r, how);
            if (watch->pidfd[r] >= 0)
                syscall(SYS_pidfd_send_signal, watch->pidfd[r], SIGKILL, NULL, 0);
        }
    }
}

static void *run(void *arg)
{
    struct slide_watch *watch = arg;
    struct slide_rank_page *own = &watch->host->header->rank[watch->host->rank];
    double last = slide_time();
    while (!slide_word_get(&watch->stop)) {
        slide_word_add(&own->beat, 1);
        double now = slide_time();
        look(watch, now - last > LATE_SECONDS);
        last = now;
        struct pollfd p = {.fd = watch->stop_pipe[0], .events = POLLIN};
        poll(&p, 1, TICK_MS);
    }
    return NULL;
}

int slide_watch_start(struct slide_host *host, const int *pids, struct slide_err *err)
{
    struct slide_watch *watch = slide_mem_new(sizeof *watch, err);
    if (!watch)
        return -1;
    watch->host = host;
    watch->stop_pipe[0] = watch->stop_pipe[1] = -1;
    for (int r = 0; r < SLIDE_RANKS_MAX; r++)
        watch->pidfd[r] = -1;
    host->watch = watch;
    watch->limit = (int)slide_env_int("SLIDE_STALL") * 1000 / TICK_MS;
    for (int r = 0; r < host->world; r++) {
        watch->pid[r] = pids[r];
        if (pids[r] == (int)getpid())
            continue;
        watch->pidfd[r] = (int)syscall(SYS_pidfd_open, pids[r], 0);
        /* ENOSYS (Linux < 5.3): beats alone have to do. ESRCH: it is dead already. */
        if (watch->pidfd[r] < 0 && errno == ESRCH)
            return slide_err_set(err, SLIDE_EPEER, "rank %d (pid %d) died", r, pids[r]);
    }
    if (pipe2(watch->stop_pipe, O_CLOEXEC))
        return slide_err_os(err, errno, "pipe of the watch thread");
    return slide_thread_start(&watch->thread, run, watch, "watch thread", err);
}

void slide_watch_stop(struct slide_host *host)
{
    struct slide_watch *watch = host->watch;
    if (!watch)
        return;
    slide_word_set(&watch->stop, 1);
    if (watch->thread.runs && write(watch->stop_pipe[1], "", 1) < 0) {
        /* the thread sees `stop` within a tick all the same */
    }
    slide_thread_join(&watch->thread);
    for (int r = 0; r < SLIDE_RANKS_MAX; r++)
        if (watch->pidfd[r] >= 0)
            close(watch->pidfd[r]);
    for (int i = 0; i < 2; i++)
        if (watch->stop_pipe[i] >= 0)
            close(watch->stop_pipe[i]);
    slide_mem_free(watch);
    host->watch = NULL;
}
