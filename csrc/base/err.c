/* The error struct: filled once, where the error is found, and decorated on the way up. It lies on
 * the caller's stack and has room for everything, so that reporting "out of memory" needs none.
 * Every layer calls this; py/ turns the result into an exception. */
#define _GNU_SOURCE 1
#include "err.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

/* Text that does not fit ends in "...", so that nobody takes it for whole. */
static void fill(char *to, size_t size, size_t used, const char *format, va_list list)
{
    int n = vsnprintf(to + used, size - used, format, list); /* used < size: to is a string */
    if (n > 0 && (size_t)n >= size - used)
        memcpy(to + size - 4, "...", 4);
}

static void add(char *to, size_t size, size_t used, const char *format, ...)
    __attribute__((format(printf, 4, 5)));

static void add(char *to, size_t size, size_t used, const char *format, ...)
{
    va_list list;
    va_start(list, format);
    fill(to, size, used, format, list);
    va_end(list);
}

int slide_err_set(struct slide_err *err, enum slide_code code, const char *format, ...)
{
    if (!err || err->code != SLIDE_OK)
        return -1;
    err->code = code;
    err->os = 0;
    va_list list;
    va_start(list, format);
    fill(err->text, sizeof err->text, 0, format, list);
    va_end(list);
    return -1;
}

int slide_err_os(struct slide_err *err, int os, const char *format, ...)
{
    if (!err || err->code != SLIDE_OK)
        return -1;
    err->code = os == ENOMEM ? SLIDE_EMEM : SLIDE_EIO;
    err->os = os;
    va_list list;
    va_start(list, format);
    fill(err->text, sizeof err->text, 0, format, list);
    va_end(list);
    char buffer[128];
    add(err->text, sizeof err->text, strlen(err->text), ": %s",
        strerror_r(os, buffer, sizeof buffer));
    return -1;
}

int slide_err_note(struct slide_err *err, const char *format, ...)
{
    if (!err || err->notes >= SLIDE_ERR_NOTES)
        return -1;
    va_list list;
    va_start(list, format);
    fill(err->note[err->notes++], SLIDE_ERR_NOTE_TEXT, 0, format, list);
    va_end(list);
    return -1;
}

const char *slide_err_name(enum slide_code code)
{
    static const char *const names[SLIDE_CODE_COUNT] = {
        [SLIDE_OK] = "SLIDE_OK",
#define X(code, python, text) [code] = #code,
#include "err.def"
#undef X
    };
    return (unsigned)code < SLIDE_CODE_COUNT ? names[code] : "SLIDE_?";
}
