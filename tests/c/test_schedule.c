/* pipe/schedule: the stage list of a pass, for many sizes: every compute stage finds its unit's
 * weights in its slot, fetches are as few as the slots allow, dependencies point backwards. */
#include <string.h>

#include "pipe/schedule.h"
#include "test.h"

#define UNITS_MAX 64

/* Walks the list as run.c does and checks what each slot holds. Returns the number of fetches. */
static int walk(const struct slide_schedule *s)
{
    int resident[UNITS_MAX], last_use[UNITS_MAX], fetches = 0, forwards = 0, outs = 0;
    int grad_unit[UNITS_MAX];
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

static void lists(void)
{
    for (int layers = 1; layers <= 9; layers++) {
        for (int slots = 2; slots <= 5; slots++) {
            for (int tied = 0; tied < 2; tied++) {
                for (int train = 0; train < 2; train++) {
                    struct slide_schedule s;
                    struct slide_err err = SLIDE_ERR_INIT;
                    CHECK(slide_schedule_init(&s, layers + 2, tied, slots, 2, train, &err) == 0);
                    int again = layers > slots ? layers - slots : 0; /* not in slots any more */
                    CHECK(walk(&s) == layers + 2 + (train ? again : 0));
                    slide_schedule_fini(&s);
                }
            }
        }
    }
}

/* A fetch stands ahead of the compute stage before its own, so that the copy hides behind it. */
static void fetches_run_ahead(void)
{
    struct slide_schedule s;
    struct slide_err err = SLIDE_ERR_INIT;
    CHECK(slide_schedule_init(&s, 10, false, 2, 2, true, &err) == 0);
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
