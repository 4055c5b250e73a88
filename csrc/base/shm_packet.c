/* The packets of the rendezvous: fixed head, text behind it, one descriptor beside it at most; and
 * the comparison of two agreements, by key, so that the error names a setting and not a line.
 * Called by shm_join.c, by rank 0 and by the others. */
#define _GNU_SOURCE 1
#include "shm_packet.h"

#include <errno.h>
#include <stdbool.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define HEAD offsetof(struct slide_packet, text)

void slide_packet_fill(struct slide_packet *p, enum slide_packet_kind kind, int rank, int world,
                       const void *text, size_t bytes)
{
    memset(p, 0, HEAD);
    p->magic = SLIDE_PACKET_MAGIC;
    p->version = SLIDE_PACKET_VERSION;
    p->kind = kind;
    p->rank = rank;
    p->world = world;
    p->pid = getpid();
    p->text_bytes = (uint32_t)bytes;
    if (bytes)
        memcpy(p->text, text, bytes);
}

void slide_packet_fail(struct slide_packet *p, int rank, const struct slide_err *err)
{
    slide_packet_fill(p, SLIDE_PACKET_FAIL, rank, 0, err->text, strlen(err->text));
    p->code = (int32_t)err->code;
    p->os = err->os;
}

int slide_packet_put(int socket, const struct slide_packet *p, int fd)
{
    union {
        struct cmsghdr header;
        char room[CMSG_SPACE(sizeof fd)];
    } control;
    struct iovec part = {(void *)p, HEAD + p->text_bytes};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
    if (fd >= 0) {
        memset(&control, 0, sizeof control);
        message.msg_control = &control;
        message.msg_controllen = sizeof control;
        struct cmsghdr *c = CMSG_FIRSTHDR(&message);
        c->cmsg_level = SOL_SOCKET;
        c->cmsg_type = SCM_RIGHTS;
        c->cmsg_len = CMSG_LEN(sizeof fd);
        memcpy(CMSG_DATA(c), &fd, sizeof fd);
    }
    ssize_t sent;
    do
        sent = sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    while (sent < 0 && errno == EINTR);
    return sent < 0 ? -1 : 0;
}

enum slide_packet_got slide_packet_get(int socket, struct slide_packet *p, int *fd)
{
    union {
        struct cmsghdr header;
        char room[CMSG_SPACE(sizeof *fd)];
    } control;
    struct iovec part = {p, sizeof *p - 1};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
    if (fd) {
        *fd = -1;
        message.msg_control = &control;
        message.msg_controllen = sizeof control;
    }
    /* A reset is told once, before the packets that came ahead of it: the sender may have said why
     * it closed. */
    ssize_t bytes;
    int resets = 0;
    do
        bytes = recvmsg(socket, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    while (bytes < 0 && (errno == EINTR || (errno == ECONNRESET && !resets++)));
    if (bytes < 0)
        return errno == EAGAIN || errno == EWOULDBLOCK ? SLIDE_PACKET_NONE : SLIDE_PACKET_GONE;
    if (fd)
        for (struct cmsghdr *c = CMSG_FIRSTHDR(&message); c; c = CMSG_NXTHDR(&message, c))
            if (c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_RIGHTS)
                memcpy(fd, CMSG_DATA(c), sizeof *fd);
    if (bytes == 0)
        return SLIDE_PACKET_GONE;
    if ((size_t)bytes < HEAD || p->magic != SLIDE_PACKET_MAGIC ||
        p->text_bytes > SLIDE_PACKET_TEXT || (size_t)bytes != HEAD + p->text_bytes ||
        (message.msg_flags & MSG_TRUNC))
        return SLIDE_PACKET_BAD;
    p->text[p->text_bytes] = '\0';
    return SLIDE_PACKET_GOT;
}

struct span {
    const char *at;
    int length;
};

/* The next line of *text, cut at the first "="; false at the end. */
static bool next_line(const char **text, struct span *key, struct span *value)
{
    while (**text == '\n')
        ++*text;
    if (!**text)
        return false;
    size_t length = strcspn(*text, "\n");
    const char *equals = memchr(*text, '=', length);
    size_t cut = equals ? (size_t)(equals - *text) : length;
    *key = (struct span){*text, (int)cut};
    *value = equals ? (struct span){equals + 1, (int)(length - cut - 1)}
                    : (struct span){*text + length, 0};
    *text += length;
    return true;
}

static bool same(struct span a, struct span b)
{
    return a.length == b.length && !memcmp(a.at, b.at, (size_t)a.length);
}

static bool find(const char *text, struct span key, struct span *value)
{
    struct span other;
    while (next_line(&text, &other, value))
        if (same(key, other))
            return true;
    return false;
}

#define SHOWN 200 /* characters of a value */
#define SPAN(s) ((s).length < SHOWN ? (s).length : SHOWN), (s).at, (s).length > SHOWN ? "..." : ""

int slide_packet_compare(const char *mine, const char *theirs, int rank, struct slide_err *err)
{
    struct span key, value, other;
    const char *text = mine;
    while (next_line(&text, &key, &value)) {
        if (!find(theirs, key, &other))
            return slide_err_set(err, SLIDE_EPEER,
                                 "ranks disagree on %.*s%s: rank %d has none, rank 0 has %.*s%s",
                                 SPAN(key), rank, SPAN(value));
        if (!same(value, other))
            return slide_err_set(err, SLIDE_EPEER,
                                 "ranks disagree on %.*s%s: rank %d has %.*s%s, rank 0 has %.*s%s",
                                 SPAN(key), rank, SPAN(other), SPAN(value));
    }
    text = theirs;
    while (next_line(&text, &key, &other))
        if (!find(mine, key, &value))
            return slide_err_set(err, SLIDE_EPEER,
                                 "ranks disagree on %.*s%s: rank %d has %.*s%s, rank 0 has none",
                                 SPAN(key), rank, SPAN(other));
    return 0;
}
