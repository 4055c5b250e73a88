/* Builds the schedule of a pass. First the compute stages in their order, which is given; then a
 * slot for each: a unit that is still in a slot is not fetched again, and a fetch takes the slot
 * whose unit is needed latest (Belady), so the last blocks of the forward stay for the backward;
 * among equals the one that has been idle longest, so that the copy may start early. A fetch stands
 * as early in the list as its slot allows, at most slots - 1 compute stages ahead. */
#include "pipe/schedule.h"

#include "base/mem.h"

struct need { /* a compute stage */
    struct slide_stage stage;
    int fetch_at;    /* compute index before which its fetch stands; -1: no fetch */
    int fetch_after; /* compute index that used the slot last; -1: none */
};

/* Slot class of a unit: first slot and how many. */
static void slot_class(const struct slide_schedule *s, int unit, int blocks, int *first, int *count)
{
    bool head = unit == s->units - 1;
    *count = 1;
    if (unit > 0 && !head) {
        *first = 0;
        *count = blocks;
    } else {
        *first = head && s->tied ? blocks + 1 : blocks;
    }
}

/* Index of the next compute stage at or after `from` that reads `unit`'s weights; n: none. */
static int next_use(const struct need *need, int n, int from, int unit, bool tied)
{
    for (int c = from; c < n; c++) {
        const struct slide_stage *s = &need[c].stage;
        bool reads_table = tied && unit == 0 && s->kind == SLIDE_STAGE_HEAD;
        bool reads = s->unit == unit && !(s->kind == SLIDE_STAGE_BACKWARD && unit == 0);
        if (reads || reads_table)
            return c;
    }
    return n;
}

static void assign(struct slide_schedule *s, struct need *need, int n, int *resident, int *used)
{
    int total = s->slots + 2;
    for (int i = 0; i < total; i++)
        resident[i] = used[i] = -1;
    for (int c = 0; c < n; c++) {
        struct slide_stage *stage = &need[c].stage;
        need[c].fetch_at = need[c].fetch_after = -1;
        if (s->tied && stage->kind == SLIDE_STAGE_HEAD) {
            stage->table = slide_schedule_edge(s); /* the embedding has stayed there */
            used[stage->table] = c;
        }
        if (stage->kind == SLIDE_STAGE_BACKWARD && stage->unit == 0)
            continue; /* the lookup's gradient needs no weights */
        int first, count, best = -1, best_use = -1;
        slot_class(s, stage->unit, s->slots, &first, &count);
        for (int i = first; i < first + count; i++) {
            if (resident[i] == stage->unit) {
                best = i;
                break;
            }
            int use = resident[i] < 0 ? n + 1 : next_use(need, n, c, resident[i], s->tied);
            if (use > best_use || (use == best_use && used[i] < used[best])) {
                best = i;
                best_use = use;
            }
        }
        stage->slot = best;
        if (resident[best] != stage->unit) {
            int ahead = c - (s->slots - 1);
            need[c].fetch_after = used[best];
            need[c].fetch_at = used[best] + 1 > ahead ? used[best] + 1 : ahead;
            if (need[c].fetch_at < 0)
                need[c].fetch_at = 0;
            resident[best] = stage->unit;
        }
        used[best] = c;
    }
}

static void emit(struct slide_schedule *s, const struct need *need, int n, int *index)
{
    for (int c = 0; c < n; c++) {
        for (int d = c; d < n; d++) {
            if (need[d].fetch_at != c)
                continue;
            int after = need[d].fetch_after;
            s->stage[s->stages++] = (struct slide_stage){.kind = SLIDE_STAGE_FETCH,
                                                         .unit = need[d].stage.unit,
                                                         .slot = need[d].stage.slot,
                                                         .table = -1,
                                                         .grad = -1,
                                                         .after = after < 0 ? -1 : index[after]};
        }
        index[c] = s->stages;
        s->stage[s->stages++] = need[c].stage;
        if (need[c].stage.grad >= 0)
            s->stage[s->stages++] = (struct slide_stage){.kind = SLIDE_STAGE_GRAD_OUT,
                                                         .unit = need[c].stage.unit,
                                                         .slot = -1,
                                                         .table = -1,
                                                         .grad = need[c].stage.grad,
                                                         .after = index[c]};
    }
}

int slide_schedule_init(struct slide_schedule *s, int units, bool tied, int slots, int grads,
                        bool train, struct slide_err *err)
{
    *s = (struct slide_schedule){
        .units = units, .slots = slots, .grads = grads, .tied = tied, .train = train};
    int n = 0, room = 2 * units;
    struct need *need = slide_mem_array((uint64_t)room, sizeof *need, err);
    int *scratch = slide_mem_array((uint64_t)(2 * (slots + 2) + room), sizeof *scratch, err);
    s->stage = slide_mem_array((uint64_t)(3 * room), sizeof *s->stage, err);
    if (!need || !scratch || !s->stage)
        goto fail;
    for (int u = 0; u < units; u++)
        need[n++].stage =
            (struct slide_stage){.kind = u == units - 1 ? SLIDE_STAGE_HEAD : SLIDE_STAGE_FORWARD,
                                 .unit = u,
                                 .slot = -1,
                                 .table = -1,
                                 .grad = -1,
                                 .after = -1};
    for (int u = units - 2; train && u >= 0; u--)
        need[n++].stage = (struct slide_stage){.kind = SLIDE_STAGE_BACKWARD,
                                               .unit = u,
                                               .slot = -1,
                                               .table = -1,
                                               .grad = -1,
                                               .after = -1};
    for (int c = units - 1, ring = 0; train && c < n; c++) {
        int first, count;
        slot_class(s, need[c].stage.unit, grads, &first, &count);
        need[c].stage.grad = count > 1 ? first + ring++ % count : first;
    }
    assign(s, need, n, scratch, scratch + slots + 2);
    emit(s, need, n, scratch + 2 * (slots + 2));
    slide_mem_free(scratch);
    slide_mem_free(need);
    return 0;
fail:
    slide_mem_free(scratch);
    slide_mem_free(need);
    slide_schedule_fini(s);
    return -1;
}

void slide_schedule_fini(struct slide_schedule *s)
{
    slide_mem_free(s->stage);
    s->stage = NULL;
    s->stages = 0;
}
