/* Where each parameter lies: units, the tensors of a unit, its planes in the segment, and which
 * rank owns which slice. Pure arithmetic over (model, world, modes); every rank computes the same.
 * Threads: read-only after slide_layout_init. Blocks: never. */
#ifndef SLIDE_STATE_LAYOUT_H
#define SLIDE_STATE_LAYOUT_H

#include <stddef.h>
#include <stdint.h>

#include "base/dtype.h"
#include "base/err.h"
#include "model/model.h"

#define SLIDE_BORDER 64 /* elements: tensors and slices start on it */

enum slide_plane {
    SLIDE_PLANE_HI, /* split: bf16 high part; FP32 mode: the FP32 master */
    SLIDE_PLANE_LO, /* split: int16 low part; FP32 mode: absent */
    SLIDE_PLANE_M,
    SLIDE_PLANE_V,
    SLIDE_PLANE_GRAD, /* reduced gradients that wait for their update, or are kept: FP32 or BF16 */
    SLIDE_PLANES
};

struct slide_tensor { /* a weight of a unit */
    const struct slide_weight *weight;
    uint64_t offset; /* elements from the unit's start */
    uint64_t count;
    int64_t rows, cols;
};

struct slide_unit {
    enum slide_unit_kind kind;
    int index;
    struct slide_tensor *tensor; /* one per table weight; count 0 where the condition is false */
    int tensors;
    uint64_t count;             /* elements, padding included; a multiple of SLIDE_BORDER */
    uint64_t decay_end;         /* elements before it decay, those after don't */
    size_t plane[SLIDE_PLANES]; /* byte offset in the segment; 0: absent */
};

struct slide_layout {
    const struct slide_model *model;
    struct slide_unit *unit;
    int units, world;
    int split;                     /* 1: hi/lo masters, weights move as BF16; 0: FP32 throughout */
    int grad_bytes;                /* an element of the gradient plane: 4, 2, or 0 without one */
    uint64_t params, count;        /* without and with padding */
    size_t staging, staging_bytes; /* the routes' rings, one a rank: offset, bytes of one */
    size_t slots, slots_bytes;     /* slots that the ranks read of each other: likewise, or 0 */
    size_t bytes;                  /* of the whole segment */
    uint64_t resident;             /* bytes of it that are populated: header, planes, staging */
    uint64_t hash;                 /* of everything above: equal on all ranks */
};

int slide_layout_init(struct slide_layout *layout, const struct slide_model *model, int world,
                      int split, int grad_bytes, struct slide_err *err);
/* The areas behind the planes, bytes a rank of each; once, before the segment is made. */
void slide_layout_areas(struct slide_layout *layout, size_t staging_bytes, size_t slots_bytes);
void slide_layout_fini(struct slide_layout *layout);

/* Elements [first, end) of unit `u` that rank owns. */
void slide_layout_slice(const struct slide_layout *layout, int unit, int rank, uint64_t *first,
                        uint64_t *end);
size_t slide_layout_plane_size(const struct slide_layout *layout, enum slide_plane plane);
enum slide_dtype slide_layout_weight_type(const struct slide_layout *layout);

/* A plane from `unit` on, as many whole units as fit `limit` bytes but at least one: their place in
 * the segment. Returns the unit after them. What is registered with a GPU goes by these pieces, for
 * drivers refuse very large registrations, and a copy must not cross a border. */
int slide_layout_piece(const struct slide_layout *layout, enum slide_plane plane, int unit,
                       size_t limit, size_t *offset, size_t *bytes);

/* Finds a checkpoint tensor by its name without "model." prefix: its unit, offset in elements from
 * the unit's start, and shape (cols 1 for a vector). -1 when the model has no such tensor. */
struct slide_place {
    int unit, decay;
    uint64_t offset, count;
    int64_t rows, cols;
};
int slide_layout_find(const struct slide_layout *layout, const char *name,
                      struct slide_place *place);
/* The i-th checkpoint tensor in layout order; returns 0 past the last. */
int slide_layout_name(const struct slide_layout *layout, int i, char *name, size_t size,
                      struct slide_place *place);

#endif
