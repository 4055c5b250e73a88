/* The packets of the rendezvous, and the comparison of two agreements. For shm_join.c alone.
 * Threads: any. Blocks: never. */
#ifndef SLIDE_BASE_SHM_PACKET_H
#define SLIDE_BASE_SHM_PACKET_H

#include <stddef.h>
#include <stdint.h>

#include "err.h"

#define SLIDE_PACKET_MAGIC 0x736c6469u
#define SLIDE_PACKET_VERSION 1u
#define SLIDE_PACKET_TEXT (64u << 10) /* of an agreement; a socket's buffer holds it */

enum slide_packet_kind {
    SLIDE_PACKET_HELLO,
    SLIDE_PACKET_WELCOME,
    SLIDE_PACKET_READY,
    SLIDE_PACKET_GO,
    SLIDE_PACKET_FAIL
};

struct slide_packet {
    uint32_t magic, version, kind;
    int32_t rank, world, pid; /* of the sender; FAIL: the rank where it happened, or -1 */
    int32_t code, os;         /* FAIL */
    uint32_t text_bytes;
    char text[SLIDE_PACKET_TEXT + 1]; /* HELLO: agreement; WELCOME: int32_t pids; FAIL: message */
};

enum slide_packet_got { SLIDE_PACKET_GOT, SLIDE_PACKET_NONE, SLIDE_PACKET_GONE, SLIDE_PACKET_BAD };

void slide_packet_fill(struct slide_packet *p, enum slide_packet_kind kind, int rank, int world,
                       const void *text, size_t bytes);
void slide_packet_fail(struct slide_packet *p, int rank, const struct slide_err *err);

/* Sends a packet, with a descriptor unless fd is -1. It never waits: the buffer of a socket takes
 * the two packets that a side ever sends. 0, or -1 and errno. */
int slide_packet_put(int socket, const struct slide_packet *p, int fd);
/* Takes a packet, if there is one; the text is ended with a NUL. With `fd` NULL, descriptors that
 * come along are dropped. */
enum slide_packet_got slide_packet_get(int socket, struct slide_packet *p, int *fd);

/* 0 when the "key=value\n" lines of both are the same, in any order; else SLIDE_EPEER with the
 * first difference, seen from rank 0, whose text `mine` is. */
int slide_packet_compare(const char *mine, const char *theirs, int rank, struct slide_err *err);

#endif
