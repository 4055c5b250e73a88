/* Faults and sleeps on demand. The environment is looked at on every passing, which is cheap beside
 * any stage, so that a test may set, change and unset it in one process; a changed SLIDE_FAULT
 * starts counting anew.
 * Called by train/, pipe/ and py/ at the head of each stage. */
#include "fault.h"

#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "env.h"

enum action { KILL, STOP, ERROR, SPOIL_INF, SPOIL_NAN, ACTIONS };

struct spec {
    char text[96]; /* what SLIDE_FAULT was when this was parsed; "": nothing */
    char stage[16];
    int rank;
    enum action action;
    long at, passed;
};

/* The test hook's state. `armed` is read without the lock: it only says that there is something to
 * forget when the variable is gone. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct spec current;
static _Atomic int armed;
static _Atomic uint32_t passings;

static int number(const char *text, long low, long *value)
{
    char *end;
    *value = strtol(text, &end, 10);
    return *text && !*end && *value >= low ? 0 : -1;
}

static int parse(const char *text, struct spec *spec, struct slide_err *err)
{
    static const char *const stages[] = {"load",    "fetch",  "forward", "backward",
                                         "copyout", "chunk",  "reduce",  "update",
                                         "save",    "gather", "offer"};
    static const char *const actions[ACTIONS] = {[KILL] = "kill",
                                                 [STOP] = "stop",
                                                 [ERROR] = "error",
                                                 [SPOIL_INF] = "inf",
                                                 [SPOIL_NAN] = "nan"};
    char copy[sizeof spec->text];
    char *field[5] = {NULL}, *rest = copy;
    int fields = 0, ok = 0;
    long rank = 0, at = 1;

    if (strlen(text) < sizeof copy) {
        strcpy(copy, text);
        while (fields < 5 && rest)
            field[fields++] = strsep(&rest, ":");
        for (size_t i = 0; i < sizeof stages / sizeof stages[0] && fields >= 3; i++)
            ok |= !strcmp(field[0], stages[i]);
        ok &= fields == 3 || (fields == 4 && !number(field[3], 1, &at));
    }
    int action = 0;
    while (ok && action < ACTIONS && strcmp(field[2], actions[action]))
        action++;
    ok = ok && action < ACTIONS && (action < SPOIL_INF || !strcmp(field[0], "chunk"));
    if (!ok || number(field[1], 0, &rank))
        return slide_err_set(
            err, SLIDE_EINVAL,
            "SLIDE_FAULT=%s: expected STAGE:RANK:ACTION[:N], STAGE one of load, "
            "fetch, forward, backward, copyout, chunk, reduce, update, save, ACTION "
            "one of kill, stop, error, at chunk inf and nan",
            text);
    memset(spec, 0, sizeof *spec);
    strcpy(spec->text, text);
    snprintf(spec->stage, sizeof spec->stage, "%s", field[0]);
    spec->rank = (int)rank;
    spec->action = (enum action)action;
    spec->at = at;
    return 0;
}

/* 1: this passing is the one that acts; 0: not; -1: the variable can't be understood. */
static int hit_locked(const char *text, const char *stage, int rank, enum action *action,
                      struct slide_err *err)
{
    if (strcmp(current.text, text)) {
        current.text[0] = '\0';
        if (*text && parse(text, &current, err))
            return -1;
        atomic_store_explicit(&armed, *text != '\0', memory_order_relaxed);
    }
    if (!*text || rank != current.rank || strcmp(stage, current.stage))
        return 0;
    *action = current.action;
    return ++current.passed == current.at;
}

static void jitter(uint32_t seed)
{
    /* Any mix will do: the sleeps must differ from passing to passing and from seed to seed. */
    uint32_t x = seed * 0x9e3779b9u + atomic_fetch_add_explicit(&passings, 1, memory_order_relaxed);
    x = (x ^ x >> 16) * 0x85ebca6bu;
    x = (x ^ x >> 13) * 0xc2b2ae35u;
    x ^= x >> 16;
    nanosleep(&(struct timespec){.tv_nsec = x % 2000001u}, NULL);
}

int slide_fault_value(const char *stage, int rank, bool *spoil, float *value, struct slide_err *err)
{
    *spoil = false;
    const char *text = slide_env_get("SLIDE_FAULT");
    const char *seed = slide_env_get("SLIDE_JITTER");
    if (strcmp(seed, "0"))
        jitter((uint32_t)slide_env_int("SLIDE_JITTER"));
    if (!*text && !atomic_load_explicit(&armed, memory_order_relaxed))
        return 0;

    enum action action = ERROR;
    pthread_mutex_lock(&lock);
    int hit = hit_locked(text, stage, rank, &action, err);
    pthread_mutex_unlock(&lock);
    if (hit < 0)
        return -1;
    if (!hit)
        return 0;
    switch (action) {
    case KILL:
        raise(SIGKILL);
        break;
    case STOP:
        raise(SIGSTOP); /* the whole process, until a SIGCONT */
        break;
    case ERROR:
        return slide_err_set(err, SLIDE_EDEVICE, "a fault was asked for at stage %s (SLIDE_FAULT)",
                             stage);
    case SPOIL_INF:
    case SPOIL_NAN:
        *spoil = true;
        *value = action == SPOIL_INF ? INFINITY : NAN;
        break;
    case ACTIONS:
        break;
    }
    return 0;
}

int slide_fault(const char *stage, int rank, struct slide_err *err)
{
    bool spoil;
    float value;
    return slide_fault_value(stage, rank, &spoil, &value, err);
}
