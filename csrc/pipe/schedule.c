/* Builds the schedule of a pass. First the compute stages in their order, which is given; then a
 * slot for each: a unit that is still in a slot is not fetched again, and a fetch takes the slot
 * whose unit is needed latest (Belady), so the last blocks of the forward stay for the backward;
 * among equals the one that has been idle longest, so that the copy may start early. A fetch stands
 * as early in the list as its slot allows, at most slots - 1 compute stages ahead.
 *
 * Outputs that wait in host memory take the places of their ring in turn. Each is saved once its
 * forward has run, and restored as soon as its place is free in the backward; the last of them are
 * still in the ring then, and go nowhere. */
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

/* ---- outputs in host memory ---- */

struct ring {
    int places, count; /* outputs in all */
    int *number;       /* [units]: which one, -1: it stays on the device */
};

static bool saved(const struct ring *ring, int unit)
{
    return ring->number[unit] >= 0 && ring->number[unit] < ring->count - ring->places;
}

/* The unit with that number; -1: none. */
static int unit_of(const struct ring *ring, int units, int number)
{
    for (int u = 0; u < units; u++)
        if (number >= 0 && ring->number[u] == number)
            return u;
    return -1;
}

static void add(struct slide_schedule *s, enum slide_stage_kind kind, int unit, int slot, int after)
{
    s->stage[s->stages++] = (struct slide_stage){
        .kind = kind, .unit = unit, .slot = slot, .table = -1, .grad = -1, .after = after};
}

/* After a compute stage: what it made goes out; what may take the place that it read comes in. */
static void emit_ring(struct slide_schedule *s, const struct ring *ring,
                      const struct slide_stage *stage, int index)
{
    int input = stage->unit - 1;
    if (!s->train)
        return;
    if (stage->kind == SLIDE_STAGE_FORWARD && saved(ring, stage->unit))
        add(s, SLIDE_STAGE_SAVE, stage->unit, ring->number[stage->unit] % ring->places, index);
    if (stage->kind == SLIDE_STAGE_BACKWARD && input >= 0 && ring->number[input] >= 0) {
        int next = unit_of(ring, s->units, ring->number[input] - ring->places);
        if (next >= 0)
            add(s, SLIDE_STAGE_RESTORE, next, ring->number[next] % ring->places, index);
    }
}

static void emit(struct slide_schedule *s, const struct ring *ring, const struct need *need, int n,
                 int *index)
{
    for (int c = 0; c < n; c++) {
        for (int d = c; d < n; d++) {
            if (need[d].fetch_at != c)
                continue;
            int after = need[d].fetch_after;
            add(s, SLIDE_STAGE_FETCH, need[d].stage.unit, need[d].stage.slot,
                after < 0 ? -1 : index[after]);
        }
        index[c] = s->stages;
        s->stage[s->stages++] = need[c].stage;
        if (need[c].stage.grad >= 0) {
            add(s, SLIDE_STAGE_GRAD_OUT, need[c].stage.unit, -1, index[c]);
            s->stage[s->stages - 1].grad = need[c].stage.grad;
        }
        emit_ring(s, ring, &need[c].stage, index[c]);
    }
}

int slide_schedule_init(struct slide_schedule *s, const struct slide_schedule_options *o,
                        struct slide_err *err)
{
    int units = o->units, slots = o->slots, grads = o->grads;
    *s = (struct slide_schedule){
        .units = units, .slots = slots, .grads = grads, .tied = o->tied, .train = o->train};
    int n = 0, room = 2 * units;
    struct need *need = slide_mem_array((uint64_t)room, sizeof *need, err);
    int *scratch =
        slide_mem_array((uint64_t)(2 * (slots + 2) + room + units), sizeof *scratch, err);
    s->stage = slide_mem_array((uint64_t)(5 * room), sizeof *s->stage, err);
    if (!need || !scratch || !s->stage)
        goto fail;
    struct ring ring = {.places = o->ring, .number = scratch + 2 * (slots + 2) + room};
    for (int u = 0; u < units; u++)
        ring.number[u] = o->offload && o->offload[u] ? ring.count++ : -1;
    for (int u = 0; u < units; u++)
        need[n++].stage =
            (struct slide_stage){.kind = u == units - 1 ? SLIDE_STAGE_HEAD : SLIDE_STAGE_FORWARD,
                                 .unit = u,
                                 .slot = -1,
                                 .table = -1,
                                 .grad = -1,
                                 .after = -1};
    for (int u = units - 2; o->train && u >= 0; u--)
        need[n++].stage = (struct slide_stage){.kind = SLIDE_STAGE_BACKWARD,
                                               .unit = u,
                                               .slot = -1,
                                               .table = -1,
                                               .grad = -1,
                                               .after = -1};
    for (int c = units - 1, turn = 0; o->train && c < n; c++) {
        int first, count;
        slot_class(s, need[c].stage.unit, grads, &first, &count);
        need[c].stage.grad = count > 1 ? first + turn++ % count : first;
    }
    assign(s, need, n, scratch, scratch + slots + 2);
    emit(s, &ring, need, n, scratch + 2 * (slots + 2));
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
