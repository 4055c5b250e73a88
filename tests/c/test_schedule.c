/* pipe/schedule: the stage list of a pass, for many sizes: every compute stage finds its unit's
 * weights in its slot, fetches are as few as the slots allow, dependencies point backwards. */
#include <string.h>

#include "pipe/schedule.h"
#include "test.h"

#define UNITS_MAX 64

#define RING 2

static int number_of(const uint8_t *offload, int unit)
{
    int number = 0;
    for (int u = 0; u < unit; u++)
        number += offload[u];
    return number;
}

/* Walks the list as run.c does and checks what each slot holds. Returns the number of fetches. */
static int walk(const struct slide_schedule *s, const uint8_t *offload)
{
    int resident[UNITS_MAX], last_use[UNITS_MAX], fetches = 0, forwards = 0, outs = 0;
    int grad_unit[UNITS_MAX];
    int place[RING]; /* whose output is in the ring's place */
    for (int i = 0; i < RING; i++)
        place[i] = -1;
    for (int i = 0; i < UNITS_MAX; i++)
        resident[i] = last_use[i] = grad_unit[i] = -1;
    for (int i = 0; i < s->stages; i++) {
        const struct slide_stage *stage = &s->stage[i];
        CHECK(stage->after < i);
        switch (stage->kind) {
        case SLIDE_STAGE_FETCH:
            CHECK(stage->after >= last_use[stage->slot]); /* nobody reads the slot any more */
            resident[stage->slot] = stage->unit;
            fetches++;
            break;
        case SLIDE_STAGE_FORWARD:
        case SLIDE_STAGE_HEAD:
        case SLIDE_STAGE_BACKWARD:
            if (stage->kind != SLIDE_STAGE_BACKWARD)
                CHECK(stage->unit == forwards++);
            if (stage->kind == SLIDE_STAGE_FORWARD && offload[stage->unit])
                place[number_of(offload, stage->unit) % RING] = stage->unit;
            /* The input is in its place, or has never left the device. */
            if (stage->kind != SLIDE_STAGE_HEAD && stage->unit > 0 && offload[stage->unit - 1])
                CHECK(place[number_of(offload, stage->unit - 1) % RING] == stage->unit - 1);
            if (stage->kind == SLIDE_STAGE_HEAD && s->tied) {
                CHECK(stage->table >= 0 && resident[stage->table] == 0);
                last_use[stage->table] = i;
            }
            if (stage->kind == SLIDE_STAGE_BACKWARD && stage->unit == 0) {
                CHECK(stage->slot == -1);
            } else {
                CHECK(stage->slot >= 0 && resident[stage->slot] == stage->unit);
                last_use[stage->slot] = i;
            }
            CHECK((stage->grad >= 0) == (s->train && stage->kind != SLIDE_STAGE_FORWARD));
            if (stage->grad >= 0)
                grad_unit[stage->grad] = stage->unit;
            break;
        case SLIDE_STAGE_SAVE:
            CHECK(stage->unit == forwards - 1 && stage->after == i - 1);
            break;
        case SLIDE_STAGE_RESTORE:
            CHECK(s->stage[stage->after].kind == SLIDE_STAGE_BACKWARD);
            place[stage->slot] = stage->unit;
            break;
        case SLIDE_STAGE_GRAD_OUT:
            CHECK(stage->after == i - 1 && grad_unit[stage->grad] == stage->unit);
            CHECK(stage->unit == s->units - 1 - outs++); /* top down, each once */
            break;
        }
    }
    CHECK(forwards == s->units);
    CHECK(outs == (s->train ? s->units : 0));
    return fetches;
}

/* Which outputs wait in host memory: none, all that may, every other one. */
static void fill(uint8_t *offload, int units, int kind)
{
    memset(offload, 0, UNITS_MAX);
    for (int u = 0; u < units - 2; u++)
        offload[u] = kind == 1 || (kind == 2 && u % 2 == 0);
}

static void lists(void)
{
    for (int i = 0; i < 9 * 4 * 2 * 2 * 3; i++) {
        int layers = 1 + i % 9, slots = 2 + i / 9 % 4, tied = i / 36 % 2, train = i / 72 % 2;
        uint8_t offload[UNITS_MAX];
        struct slide_schedule s;
        struct slide_err err = SLIDE_ERR_INIT;
        fill(offload, layers + 2, i / 144);
        struct slide_schedule_options o = {.units = layers + 2,
                                           .slots = slots,
                                           .grads = 2,
                                           .tied = tied,
                                           .train = train,
                                           .offload = offload,
                                           .ring = RING};
        CHECK(slide_schedule_init(&s, &o, &err) == 0);
        int again = layers > slots ? layers - slots : 0; /* not in slots any more */
        CHECK(walk(&s, offload) == layers + 2 + (train ? again : 0));
        int saves = 0, restores = 0, count = number_of(offload, layers + 2);
        for (int k = 0; k < s.stages; k++) {
            saves += s.stage[k].kind == SLIDE_STAGE_SAVE;
            restores += s.stage[k].kind == SLIDE_STAGE_RESTORE;
        }
        int leave = train && count > RING ? count - RING : 0;
        CHECK(saves == leave && restores == leave);
        slide_schedule_fini(&s);
    }
}

/* A fetch stands ahead of the compute stage before its own, so that the copy hides behind it. */
static void fetches_run_ahead(void)
{
    struct slide_schedule s;
    struct slide_err err = SLIDE_ERR_INIT;
    struct slide_schedule_options o = {.units = 10, .slots = 2, .grads = 2, .train = true};
    CHECK(slide_schedule_init(&s, &o, &err) == 0);
    int ahead = 0, fetched[10] = {0};
    for (int i = 0, computes = 0, needs = 0; i < s.stages; i++) {
        const struct slide_stage *stage = &s.stage[i];
        if (stage->kind == SLIDE_STAGE_FETCH) {
            fetched[stage->unit] = computes + 1;
            needs++;
        } else if (stage->kind != SLIDE_STAGE_GRAD_OUT) {
            if (fetched[stage->unit] && fetched[stage->unit] <= computes)
                ahead++; /* at least one compute stage between fetch and use */
            fetched[stage->unit] = 0;
            computes++;
        }
        (void)needs;
    }
    CHECK(ahead >= 12); /* 10 units forward and 6 backward are fetched; the first can't be early */
    slide_schedule_fini(&s);
}

TEST_MAIN(CASE(lists), CASE(fetches_run_ahead))
