/* Errors: one struct on the caller's stack, passed last. The first error wins; callers on the way
 * up add notes, which become exception notes in Python. Functions that can fail return 0 or -1
 * (or a pointer or NULL) and have filled `err` when they fail.
 * Threads: a struct belongs to one thread. Blocks: never. */
#ifndef SLIDE_BASE_ERR_H
#define SLIDE_BASE_ERR_H

#include <stdint.h>

enum slide_code {
    SLIDE_OK = 0,
#define X(code, python, text) code,
#include "err.def"
#undef X
    SLIDE_CODE_COUNT
};

#define SLIDE_ERR_TEXT 960
#define SLIDE_ERR_NOTES 4
#define SLIDE_ERR_NOTE_TEXT 200

struct slide_err {
    enum slide_code code;
    int rank;  /* the rank where it happened first, -1: here */
    int os;    /* errno when the cause was a system call, else 0 */
    int notes; /* notes in use */
    char text[SLIDE_ERR_TEXT];
    char note[SLIDE_ERR_NOTES][SLIDE_ERR_NOTE_TEXT];
};

#define SLIDE_ERR_INIT ((struct slide_err){.rank = -1})

/* Sets code and text unless an error is there already. Always returns -1, so that a caller can
 * write `return slide_err_set(err, SLIDE_EINVAL, "...")`. `err` may be NULL. */
int slide_err_set(struct slide_err *err, enum slide_code code, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
/* The same with errno's text appended: "...: No space left on device". */
int slide_err_os(struct slide_err *err, int os, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
/* Adds a line of context; past SLIDE_ERR_NOTES notes it is dropped. Returns -1. */
int slide_err_note(struct slide_err *err, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
const char *slide_err_name(enum slide_code code); /* "SLIDE_EMEM" */

#endif
