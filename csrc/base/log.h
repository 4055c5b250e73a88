/* Lines on stderr, one write each, "[slidedp rank 1] warning: ...". Level by SLIDE_LOG.
 * Threads: any. Blocks: for the write. */
#ifndef SLIDE_BASE_LOG_H
#define SLIDE_BASE_LOG_H

enum slide_log_level { SLIDE_LOG_WARN = 1, SLIDE_LOG_INFO = 2, SLIDE_LOG_DEBUG = 3 };

void slide_log(int rank, enum slide_log_level level, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

#endif
