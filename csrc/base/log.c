/* The log: a line is one write, so that lines of several ranks and threads never mix.
 * Called by every layer, seldom: what concerns the caller is an error or a result, not a line. */
#include "log.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "env.h"

void slide_log(int rank, enum slide_log_level level, const char *format, ...)
{
    static const char *const names[] = {
        [SLIDE_LOG_WARN] = "warning", [SLIDE_LOG_INFO] = "info", [SLIDE_LOG_DEBUG] = "debug"};
    if ((long)level > slide_env_int("SLIDE_LOG"))
        return;

    char line[1200];
    int used = rank < 0 ? snprintf(line, sizeof line, "[slidedp] %s: ", names[level])
                        : snprintf(line, sizeof line, "[slidedp rank %d] %s: ", rank, names[level]);
    size_t room = sizeof line - 1 - (size_t)used; /* a byte is kept for the line's end */
    va_list list;
    va_start(list, format);
    int n = vsnprintf(line + used, room, format, list);
    va_end(list);
    if (n > 0 && (size_t)n >= room)
        memcpy(line + sizeof line - 5, "...", 4);
    size_t length = strlen(line);
    line[length++] = '\n';
    /* A log that can't be written has nobody to tell. */
    ssize_t written = write(STDERR_FILENO, line, length);
    (void)written;
}
