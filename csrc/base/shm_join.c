/* The rendezvous of the ranks of one machine, over an abstract unix socket that rank 0 serves.
 *
 * DESIGN: one packet is one message (SOCK_SEQPACKET), a connection is one rank:
 *   joiner -> HELLO    rank, world, pid, the agreement's text
 *   rank 0 -> WELCOME  the pids of all, and the segment's descriptor, once all have come and agree
 *   joiner -> READY    it has mapped the segment
 *   rank 0 -> GO       all are ready
 * Either side may say FAIL, with an error, in place of any of them. When rank 0 meets a cause to
 * fail it still waits a moment for the ranks that have not come, so that each of them is told the
 * cause and none waits for a rank 0 that is gone. Strangers (no HELLO, or another user) are
 * dropped.
 * Called by state/ when a segment is opened. */
#define _GNU_SOURCE 1
#include "shm.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "log.h"
#include "mem.h"
#include "shm_packet.h"

#define STRANGERS 16 /* connections that have not said which rank they are */
#define GRACE 2.0    /* seconds for late ranks to be told, and for a stranger to speak */
#define TICK_MS 50

struct peer {
    int fd;   /* -1: not in use */
    int rank; /* -1: has not said */
    int ready;
    double since;
};

struct server {
    const char *agreement;
    int world, listener;
    int heard, come, ready; /* greetings, ranks that are as they should, and that have mapped */
    int *pids;
    struct peer *peers;
    struct pollfd *polls;
    int places;
    struct slide_packet *in, *out;
    struct slide_err bad; /* why all will be refused; of the lowest rank that gave cause */
    int bad_rank;
    double bad_time;
};

/* What a wait of the rendezvous looks at, beside its sockets. */
struct patience {
    const struct slide_waiter *waiter;
    double start;
};

static int patience_left(const struct patience *p, double *left, struct slide_err *err)
{
    const struct slide_waiter *waiter = p->waiter;
    *left = 1e9;
    if (!waiter)
        return 0;
    if (waiter->abort && slide_word_get(waiter->abort))
        return slide_err_set(err, SLIDE_EPEER,
                             "waiting for all ranks to meet: another rank has failed");
    if (waiter->poll && waiter->poll(waiter->arg, err))
        return slide_err_note(err, "while waiting for all ranks to meet");
    if (waiter->deadline > 0)
        *left = p->start + waiter->deadline - slide_time();
    return 0;
}

static int address(struct sockaddr_un *to, socklen_t *size, const char *name, struct slide_err *err)
{
    size_t length = strlen(name);
    memset(to, 0, sizeof *to);
    to->sun_family = AF_UNIX;
    if (!length || length > sizeof to->sun_path - 1)
        return slide_err_set(err, SLIDE_EINVAL,
                             "the rendezvous name has %zu characters; 1 to %zu are possible",
                             length, sizeof to->sun_path - 1);
    memcpy(to->sun_path + 1, name, length);
    *size = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + length);
    return 0;
}

static int check_agreement(const char *agreement, struct slide_err *err)
{
    if (strlen(agreement) > SLIDE_PACKET_TEXT)
        return slide_err_set(err, SLIDE_EINVAL, "an agreement of %zu bytes; %u are possible",
                             strlen(agreement), SLIDE_PACKET_TEXT);
    return 0;
}

static int peer_of(int socket, struct ucred *who)
{
    socklen_t size = sizeof *who;
    return getsockopt(socket, SOL_SOCKET, SO_PEERCRED, who, &size);
}

/* ---- rank 0 ---- */

/* A cause to refuse all; the one that the lowest rank gave is told. */
static void blame(struct server *s, int rank, const struct slide_err *why)
{
    if (s->bad.code == SLIDE_OK)
        s->bad_time = slide_time();
    else if (rank >= s->bad_rank)
        return;
    s->bad = *why;
    s->bad_rank = rank;
}

static void drop(struct peer *peer)
{
    close(peer->fd);
    peer->fd = -1;
}

static void hello(struct server *s, struct peer *peer)
{
    const struct slide_packet *p = s->in;
    struct slide_err why = SLIDE_ERR_INIT;
    struct ucred who = {0};
    int rank = p->rank;

    peer_of(peer->fd, &who);
    if (p->version != SLIDE_PACKET_VERSION)
        slide_err_set(&why, SLIDE_EPEER, "process %d runs another version of slidedp than rank 0",
                      (int)p->pid);
    else if (p->world != s->world)
        slide_err_set(&why, SLIDE_EPEER, "rank %d was started for %d ranks, rank 0 for %d", rank,
                      (int)p->world, s->world);
    else if (rank < 1 || rank >= s->world)
        slide_err_set(&why, SLIDE_EPEER, "process %d says it is rank %d of %d", (int)p->pid, rank,
                      s->world);
    else if (who.pid != p->pid)
        slide_err_set(&why, SLIDE_EPEER,
                      "rank %d runs in another pid namespace than rank 0: it calls itself process "
                      "%d, rank 0 sees process %d",
                      rank, (int)p->pid, (int)who.pid);
    else if (s->pids[rank])
        slide_err_set(&why, SLIDE_EPEER, "two processes say they are rank %d: %d and %d", rank,
                      s->pids[rank], (int)p->pid);
    else {
        s->pids[rank] = p->pid;
        s->come++;
        slide_packet_compare(s->agreement, p->text, rank, &why);
    }
    s->heard++;
    peer->rank = rank < 0 ? 0 : rank;
    if (why.code)
        blame(s, rank, &why);
}

static void hear(struct server *s, struct peer *peer)
{
    struct slide_err why = SLIDE_ERR_INIT;
    enum slide_packet_got got = slide_packet_get(peer->fd, s->in, NULL);
    if (got == SLIDE_PACKET_NONE)
        return;
    if (peer->rank < 0) {
        if (got == SLIDE_PACKET_GOT && s->in->kind == SLIDE_PACKET_HELLO) {
            hello(s, peer);
        } else {
            slide_log(0, SLIDE_LOG_DEBUG, "dropped a stranger at the rendezvous");
            drop(peer);
        }
        return;
    }
    if (got == SLIDE_PACKET_GOT && s->in->kind == SLIDE_PACKET_READY && !peer->ready) {
        peer->ready = 1;
        s->ready++;
        return;
    }
    if (got == SLIDE_PACKET_GOT && s->in->kind == SLIDE_PACKET_FAIL) {
        why.code = s->in->code > 0 && s->in->code < SLIDE_CODE_COUNT ? (enum slide_code)s->in->code
                                                                     : SLIDE_EPEER;
        why.os = s->in->os;
        why.rank = peer->rank;
        snprintf(why.text, sizeof why.text, "%.*s", (int)sizeof why.text - 1, s->in->text);
    } else {
        slide_err_set(&why, SLIDE_EPEER, "rank %d left before all ranks had met", peer->rank);
    }
    blame(s, peer->rank, &why);
    drop(peer);
}

static void take_in(struct server *s)
{
    int fd = accept4(s->listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (fd < 0)
        return; /* it has gone again */
    struct ucred who;
    if (peer_of(fd, &who) || who.uid != geteuid()) {
        slide_log(0, SLIDE_LOG_WARN, "refused a process of another user at the rendezvous");
        close(fd);
        return;
    }
    for (int i = 0; i < s->places; i++)
        if (s->peers[i].fd < 0) {
            s->peers[i] = (struct peer){.fd = fd, .rank = -1, .since = slide_time()};
            return;
        }
    close(fd);
}

/* Looks at every socket, for one tick at most. */
static int turn(struct server *s, struct slide_err *err)
{
    s->polls[0] = (struct pollfd){.fd = s->listener, .events = POLLIN};
    for (int i = 0; i < s->places; i++)
        s->polls[i + 1] = (struct pollfd){.fd = s->peers[i].fd, .events = POLLIN};
    if (poll(s->polls, (nfds_t)s->places + 1, TICK_MS) < 0 && errno != EINTR)
        return slide_err_os(err, errno, "waiting for all ranks to meet");
    double now = slide_time();
    for (int i = 0; i < s->places; i++) {
        struct peer *peer = &s->peers[i];
        if (peer->fd < 0)
            continue;
        if (s->polls[i + 1].revents)
            hear(s, peer);
        else if (peer->rank < 0 && now - peer->since > GRACE)
            drop(peer);
    }
    if (s->polls[0].revents)
        take_in(s);
    return 0;
}

/* Who has not come (or is not ready): "ranks 1, 3 of 4". */
static void missing(const struct server *s, bool ready, char *text, size_t size)
{
    char list[160] = "";
    size_t used = 0;
    int count = 0;
    for (int rank = 1; rank < s->world; rank++) {
        bool there = s->pids[rank] != 0;
        for (int i = 0; i < s->places && there && ready; i++)
            if (s->peers[i].fd >= 0 && s->peers[i].rank == rank)
                there = s->peers[i].ready;
        if (there)
            continue;
        if (used < sizeof list) /* else the list is cut, but the count goes on */
            used +=
                (size_t)snprintf(list + used, sizeof list - used, "%s%d", count ? ", " : "", rank);
        count++;
    }
    snprintf(text, size, "rank%s %s of %d", count == 1 ? "" : "s", list, s->world);
}

/* Until all have come (ready: are ready), or there is a cause to refuse and the grace is over. */
static int meet(struct server *s, bool ready, const struct patience *patience,
                struct slide_err *err)
{
    char who[200];
    for (;;) {
        bool all = (ready ? s->ready : s->come) == s->world - 1;
        bool told = ready || s->heard >= s->world - 1 || slide_time() - s->bad_time > GRACE;
        if (s->bad.code && told) {
            *err = s->bad;
            return -1;
        }
        if (all)
            return 0;
        double left;
        if (patience_left(patience, &left, err))
            return -1;
        if (left <= 0) {
            if (s->bad.code) {
                *err = s->bad;
                return -1;
            }
            missing(s, ready, who, sizeof who);
            return slide_err_set(err, SLIDE_ETIME,
                                 "waiting for all ranks to meet: %s not %s after "
                                 "%.3g s",
                                 who, ready ? "ready" : "there", patience->waiter->deadline);
        }
        if (turn(s, err))
            return -1;
    }
}

static int tell_all(struct server *s, const struct slide_packet *p, int fd, struct slide_err *err)
{
    for (int i = 0; i < s->places; i++) {
        struct peer *peer = &s->peers[i];
        if (peer->fd < 0 || (peer->rank < 0 && p->kind != SLIDE_PACKET_FAIL))
            continue;
        /* Whoever has left since is found by the next turn, or by the watch on its pid. */
        if (slide_packet_put(peer->fd, p, fd) && errno != EPIPE && errno != ECONNRESET &&
            p->kind != SLIDE_PACKET_FAIL)
            return slide_err_os(err, errno, "cannot answer rank %d", peer->rank);
    }
    return 0;
}

static int open_listener(const char *name, int world, struct slide_err *err)
{
    struct sockaddr_un at;
    socklen_t size;
    if (address(&at, &size, name, err))
        return -1;
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0)
        return slide_err_os(err, errno, "cannot open a socket for the rendezvous");
    if (bind(fd, (struct sockaddr *)&at, size) || listen(fd, world + STRANGERS)) {
        if (errno == EADDRINUSE)
            slide_err_set(err, SLIDE_EPEER,
                          "another process serves the rendezvous \"%s\": is there a second rank 0?",
                          name);
        else
            slide_err_os(err, errno, "cannot serve the rendezvous \"%s\"", name);
        close(fd);
        return -1;
    }
    return fd;
}

int slide_shm_serve(struct slide_shm *shm, const char *name, int world, const char *agreement,
                    int *pids, const struct slide_waiter *waiter, struct slide_err *err)
{
    struct slide_err local = SLIDE_ERR_INIT; /* what the others are told, too */
    struct server s = {.agreement = agreement,
                       .world = world,
                       .pids = pids,
                       .listener = -1,
                       .places = world - 1 + STRANGERS,
                       .bad = SLIDE_ERR_INIT};
    struct patience patience = {waiter, slide_time()};
    int rc = -1;

    if (world < 1)
        return slide_err_set(err, SLIDE_EINVAL, "a world of %d ranks", world);
    memset(pids, 0, (size_t)world * sizeof *pids);
    pids[0] = getpid();
    if (world == 1)
        return 0;

    s.peers = slide_mem_array((uint64_t)s.places, sizeof *s.peers, &local);
    if (!s.peers)
        goto out;
    for (int i = 0; i < s.places; i++)
        s.peers[i].fd = -1;
    s.polls = slide_mem_array((uint64_t)s.places + 1, sizeof *s.polls, &local);
    if (!s.polls)
        goto out;
    s.in = slide_mem_new(sizeof *s.in, &local);
    if (!s.in)
        goto out;
    s.out = slide_mem_new(sizeof *s.out, &local);
    if (!s.out)
        goto out;
    if (check_agreement(agreement, &local))
        goto out;
    s.listener = open_listener(name, world, &local);
    if (s.listener < 0)
        goto out;

    if (meet(&s, false, &patience, &local))
        goto tell;
    slide_packet_fill(s.out, SLIDE_PACKET_WELCOME, 0, world, pids, (size_t)world * sizeof *pids);
    if (tell_all(&s, s.out, shm->fd, &local) || meet(&s, true, &patience, &local))
        goto tell;
    slide_packet_fill(s.out, SLIDE_PACKET_GO, 0, world, NULL, 0);
    rc = tell_all(&s, s.out, -1, &local);

tell:
    if (local.code) {
        slide_packet_fail(s.out, local.rank, &local);
        if (local.code == SLIDE_EINTR) { /* the Ctrl-C was rank 0's alone */
            s.out->code = SLIDE_EPEER;
            s.out->rank = 0;
        }
        tell_all(&s, s.out, -1, NULL);
    }
out:
    if (s.listener >= 0)
        close(s.listener);
    for (int i = 0; s.peers && i < s.places; i++)
        if (s.peers[i].fd >= 0)
            close(s.peers[i].fd);
    slide_mem_free(s.out);
    slide_mem_free(s.in);
    slide_mem_free(s.polls);
    slide_mem_free(s.peers);
    if (local.code && err && err->code == SLIDE_OK)
        *err = local;
    return rc;
}

/* ---- the others ---- */

/* Connects, again and again: rank 0 may be slower to start. */
static int reach(const char *name, const struct patience *patience, struct slide_err *err)
{
    struct sockaddr_un at;
    socklen_t size;
    if (address(&at, &size, name, err))
        return -1;
    for (;;) {
        int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
        if (fd < 0)
            return slide_err_os(err, errno, "cannot open a socket for the rendezvous");
        if (!connect(fd, (struct sockaddr *)&at, size))
            return fd;
        int os = errno;
        close(fd);
        /* Not there yet, or its queue is full. */
        if (os != ECONNREFUSED && os != ENOENT && os != EAGAIN && os != EINTR)
            return slide_err_os(err, os, "cannot reach rank 0 at \"%s\"", name);
        double left;
        if (patience_left(patience, &left, err))
            return -1;
        if (left <= 0)
            return slide_err_set(err, SLIDE_ETIME,
                                 "waiting for all ranks to meet: rank 0 not there after %.3g s",
                                 patience->waiter->deadline);
        poll(NULL, 0, left < TICK_MS * 1e-3 ? (int)(left * 1e3) + 1 : TICK_MS);
    }
}

/* The next packet of rank 0, which is of `kind` or an error. */
static int hear_rank0(int socket, struct slide_packet *p, enum slide_packet_kind kind, int *fd,
                      const struct patience *patience, struct slide_err *err)
{
    for (;;) {
        enum slide_packet_got got = slide_packet_get(socket, p, fd);
        if (got == SLIDE_PACKET_GOT && p->kind == kind)
            return 0;
        if (got == SLIDE_PACKET_GOT && p->kind == SLIDE_PACKET_FAIL) {
            int known = p->code > 0 && p->code < SLIDE_CODE_COUNT;
            if (err && err->code == SLIDE_OK)
                err->rank = p->rank;
            slide_err_set(err, known ? (enum slide_code)p->code : SLIDE_EPEER, "%s", p->text);
            if (err)
                err->os = p->os;
            return -1;
        }
        if (got == SLIDE_PACKET_GONE)
            return slide_err_set(err, SLIDE_EPEER, "rank 0 left before all ranks had met");
        if (got != SLIDE_PACKET_NONE)
            return slide_err_set(err, SLIDE_EPEER,
                                 "rank 0 runs another version of slidedp than this rank");
        double left;
        if (patience_left(patience, &left, err))
            return -1;
        if (left <= 0)
            return slide_err_set(err, SLIDE_ETIME,
                                 "waiting for all ranks to meet: no answer of rank 0 after %.3g s",
                                 patience->waiter->deadline);
        struct pollfd one = {.fd = socket, .events = POLLIN};
        poll(&one, 1, left < TICK_MS * 1e-3 ? (int)(left * 1e3) + 1 : TICK_MS);
    }
}

int slide_shm_join(struct slide_shm *shm, const char *name, int rank, int world,
                   const char *agreement, int *pids, const struct slide_waiter *waiter,
                   struct slide_err *err)
{
    struct slide_err local = SLIDE_ERR_INIT;
    struct patience patience = {waiter, slide_time()};
    int rc = -1, socket = -1, fd = -1;
    struct ucred who;

    *shm = (struct slide_shm){.fd = -1};
    struct slide_packet *p = slide_mem_new(sizeof *p, &local);
    if (!p || check_agreement(agreement, &local))
        goto out;
    socket = reach(name, &patience, &local);
    if (socket < 0)
        goto out;
    if (peer_of(socket, &who) || who.uid != geteuid()) {
        slide_err_set(&local, SLIDE_EPEER, "the rendezvous \"%s\" is served by another user", name);
        goto out;
    }
    slide_packet_fill(p, SLIDE_PACKET_HELLO, rank, world, agreement, strlen(agreement));
    if (slide_packet_put(socket, p, -1)) {
        slide_err_os(&local, errno, "cannot greet rank 0");
        goto out;
    }
    if (hear_rank0(socket, p, SLIDE_PACKET_WELCOME, &fd, &patience, &local))
        goto out;
    if (fd < 0 || p->text_bytes != (size_t)world * sizeof *pids) {
        slide_err_set(&local, SLIDE_EPEER, "rank 0 sent no segment");
        goto out;
    }
    memcpy(pids, p->text, (size_t)world * sizeof *pids);
    int taken = fd;
    fd = -1;
    if (slide_shm_map(shm, taken, &local)) {
        slide_packet_fail(p, rank, &local);
        slide_packet_put(socket, p, -1); /* if rank 0 is gone as well, nobody is left to be told */
        goto out;
    }
    slide_packet_fill(p, SLIDE_PACKET_READY, rank, world, NULL, 0);
    if (slide_packet_put(socket, p, -1) && errno != EPIPE && errno != ECONNRESET) {
        slide_err_os(&local, errno, "cannot answer rank 0");
        goto out;
    }
    if (hear_rank0(socket, p, SLIDE_PACKET_GO, NULL, &patience, &local))
        goto out;
    rc = 0;

out:
    if (rc)
        slide_shm_close(shm);
    if (fd >= 0)
        close(fd);
    if (socket >= 0)
        close(socket);
    slide_mem_free(p);
    if (local.code && err && err->code == SLIDE_OK)
        *err = local;
    return rc;
}
