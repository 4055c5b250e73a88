/* The layout: offsets of tensors in units, of planes in the segment, slices of owners. Tensors of a
 * unit stand in the order of the family's table, which lists those with weight decay first, so that
 * one border (decay_end) splits a unit for the optimizer. Planes start on 2 MiB, the size of a huge
 * page and of a registration; the holes between them are never touched and cost no memory. */
#include "state/layout.h"

#include <stdio.h>
#include <string.h>

#include "base/mem.h"
#include "state/host.h"

#define PLANE_ALIGN ((size_t)2 << 20)
#define PAGE ((size_t)4096)

static uint64_t round_up(uint64_t x, uint64_t to)
{
    return (x + to - 1) / to * to;
}

static uint64_t mix(uint64_t hash, uint64_t x)
{
    hash ^= x; /* FNV-1a over 64-bit words */
    return hash * 0x100000001b3ull;
}

int slide_layout_piece(const struct slide_layout *layout, enum slide_plane plane, int unit,
                       size_t limit, size_t *offset, size_t *bytes)
{
    size_t size = slide_layout_plane_size(layout, plane);
    *offset = layout->unit[unit].plane[plane];
    for (int u = unit; u < layout->units; u++) {
        const struct slide_unit *one = &layout->unit[u];
        size_t end = one->plane[plane] + round_up(one->count * size, PAGE);
        if (u > unit && end - *offset > limit)
            return u;
        *bytes = end - *offset;
    }
    return layout->units;
}

size_t slide_layout_plane_size(const struct slide_layout *layout, enum slide_plane plane)
{
    switch (plane) {
    case SLIDE_PLANE_HI:
        return layout->split ? 2 : 4;
    case SLIDE_PLANE_LO:
        return layout->split ? 2 : 0;
    case SLIDE_PLANE_M:
    case SLIDE_PLANE_V:
        return 4;
    case SLIDE_PLANE_GRAD:
        return (size_t)layout->grad_bytes;
    default:
        return 0;
    }
}

enum slide_dtype slide_layout_weight_type(const struct slide_layout *layout)
{
    return layout->split ? SLIDE_BF16 : SLIDE_F32;
}

/* Tensors and counts of one unit. */
static int lay_unit(struct slide_layout *layout, int u, struct slide_err *err)
{
    const struct slide_model *model = layout->model;
    const struct slide_unit_table *table = slide_model_table(model, u);
    struct slide_unit *unit = &layout->unit[u];
    unit->index = u;
    unit->kind = slide_model_kind(model, u);
    unit->tensors = table->weights;
    unit->tensor = slide_mem_array((uint64_t)table->weights, sizeof *unit->tensor, err);
    if (!unit->tensor)
        return -1;
    uint64_t at = 0;
    for (int i = 0; i < table->weights; i++) {
        const struct slide_weight *weight = &table->weight[i];
        struct slide_tensor *tensor = &unit->tensor[i];
        tensor->weight = weight;
        tensor->offset = at;
        if (!slide_model_has(model, weight->cond))
            continue;
        tensor->rows = slide_model_rows(model, weight);
        tensor->cols = slide_model_dim(model, weight->cols);
        tensor->count = (uint64_t)tensor->rows * (uint64_t)tensor->cols;
        layout->params += tensor->count;
        at = round_up(at + tensor->count, SLIDE_BORDER);
        if (weight->decay && unit->decay_end != tensor->offset)
            return slide_err_set(err, SLIDE_ESTATE, "%s: weight %s: tensors with decay come first",
                                 model->family->model_type, weight->name);
        if (weight->decay)
            unit->decay_end = at;
    }
    unit->count = at;
    layout->count += at;
    return 0;
}

int slide_layout_init(struct slide_layout *layout, const struct slide_model *model, int world,
                      int split, int grad_bytes, struct slide_err *err)
{
    *layout = (struct slide_layout){.model = model,
                                    .units = model->units,
                                    .world = world,
                                    .split = split,
                                    .grad_bytes = grad_bytes};
    if (world < 1 || world > SLIDE_RANKS_MAX)
        return slide_err_set(err, SLIDE_EINVAL, "world is %d, must be 1 to %d", world,
                             SLIDE_RANKS_MAX);
    layout->unit = slide_mem_array((uint64_t)model->units, sizeof *layout->unit, err);
    if (!layout->unit)
        return -1;
    for (int u = 0; u < layout->units; u++) {
        if (lay_unit(layout, u, err)) {
            slide_layout_fini(layout);
            return -1;
        }
    }
    size_t at = round_up(slide_header_size(layout->units), PLANE_ALIGN);
    layout->resident = round_up(slide_header_size(layout->units), PAGE);
    /* Plane by plane, so that everything that is pinned (hi) lies side by side. */
    for (int p = 0; p < SLIDE_PLANES; p++) {
        size_t size = slide_layout_plane_size(layout, (enum slide_plane)p);
        for (int u = 0; size && u < layout->units; u++) {
            layout->unit[u].plane[p] = at;
            layout->resident += round_up(layout->unit[u].count * size, PAGE);
            at = round_up(at + layout->unit[u].count * size, PLANE_ALIGN);
        }
    }
    layout->staging = layout->slots = layout->bytes = at;

    uint64_t hash = 0xcbf29ce484222325ull;
    hash = mix(hash, (uint64_t)world);
    hash = mix(hash, (uint64_t)split * 8 + (uint64_t)grad_bytes);
    for (int u = 0; u < layout->units; u++) {
        hash = mix(hash, layout->unit[u].count);
        hash = mix(hash, layout->unit[u].decay_end);
        for (int i = 0; i < layout->unit[u].tensors; i++)
            hash = mix(hash, layout->unit[u].tensor[i].count);
    }
    layout->hash = hash;
    return 0;
}

void slide_layout_areas(struct slide_layout *layout, size_t staging_bytes, size_t slots_bytes)
{
    size_t world = (size_t)layout->world;
    layout->staging_bytes = round_up(staging_bytes, PAGE);
    layout->slots_bytes = round_up(slots_bytes, PAGE);
    layout->slots = round_up(layout->staging + layout->staging_bytes * world, PLANE_ALIGN);
    layout->bytes = round_up(layout->slots + layout->slots_bytes * world, PLANE_ALIGN);
    layout->resident += (layout->staging_bytes + layout->slots_bytes) * world;
    layout->hash = mix(mix(layout->hash, layout->staging_bytes), layout->slots_bytes);
}

void slide_layout_fini(struct slide_layout *layout)
{
    for (int u = 0; layout->unit && u < layout->units; u++)
        slide_mem_free(layout->unit[u].tensor);
    slide_mem_free(layout->unit);
    layout->unit = NULL;
}

void slide_layout_slice(const struct slide_layout *layout, int unit, int rank, uint64_t *first,
                        uint64_t *end)
{
    uint64_t blocks = layout->unit[unit].count / SLIDE_BORDER;
    uint64_t world = (uint64_t)layout->world, r = (uint64_t)rank;
    *first = blocks * r / world * SLIDE_BORDER;
    *end = blocks * (r + 1) / world * SLIDE_BORDER;
}

/* Name and place of part `p` of tensor `t`. */
static void part_place(const struct slide_layout *layout, const struct slide_unit *unit,
                       const struct slide_tensor *tensor, int part, char *name, size_t size,
                       struct slide_place *place)
{
    int64_t row = 0;
    for (int p = 0; p < part; p++)
        row += slide_model_dim(layout->model, tensor->weight->part[p].rows);
    int64_t rows = slide_model_dim(layout->model, tensor->weight->part[part].rows);
    *place = (struct slide_place){
        .unit = unit->index,
        .decay = tensor->weight->decay,
        .offset = tensor->offset + (uint64_t)row * (uint64_t)tensor->cols,
        .count = (uint64_t)rows * (uint64_t)tensor->cols,
        .rows = rows,
        .cols = tensor->cols,
    };
    /* "layers.%d.x": the family's table holds the only format strings, each with one %d. */
    const char *pattern = tensor->weight->part[part].name;
    const char *mark = strstr(pattern, "%d");
    if (mark)
        snprintf(name, size, "%.*s%d%s", (int)(mark - pattern), pattern, unit->index - 1, mark + 2);
    else
        snprintf(name, size, "%s", pattern);
}

int slide_layout_name(const struct slide_layout *layout, int i, char *name, size_t size,
                      struct slide_place *place)
{
    for (int u = 0; u < layout->units; u++) {
        const struct slide_unit *unit = &layout->unit[u];
        for (int t = 0; t < unit->tensors; t++) {
            if (!unit->tensor[t].count)
                continue;
            int parts = unit->tensor[t].weight->parts;
            if (i < parts) {
                part_place(layout, unit, &unit->tensor[t], i, name, size, place);
                return 1;
            }
            i -= parts;
        }
    }
    return 0;
}

int slide_layout_find(const struct slide_layout *layout, const char *name,
                      struct slide_place *place)
{
    /* The block number in the name leads to the unit: no search through all layers. */
    int first = 0, last = layout->units, number = -1, used = 0;
    if (sscanf(name, "layers.%d.%n", &number, &used) == 1 && used > 0) {
        if (number < 0 || number + 1 >= layout->units)
            return -1;
        first = number + 1;
        last = first + 1;
    }
    for (int u = first; u < last; u++) {
        const struct slide_unit *unit = &layout->unit[u];
        for (int t = 0; t < unit->tensors; t++) {
            for (int p = 0; unit->tensor[t].count && p < unit->tensor[t].weight->parts; p++) {
                char have[160];
                part_place(layout, unit, &unit->tensor[t], p, have, sizeof have, place);
                if (!strcmp(have, name))
                    return 0;
            }
        }
    }
    return -1;
}
