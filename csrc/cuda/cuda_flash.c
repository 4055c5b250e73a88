/* Starts our own attention kernels (kernels/flash*.cu): chooses the instance by dtype and head
 * size, and sets grid and shared memory by the tables of flash_args.h. Serves every shape up to
 * head_dim 512, so it is what remains where cuDNN is missing or refuses.
 * Called by cuda_attn.c. */
#include "cuda/cuda_inside.h"
#include "cuda/flash_args.h"

enum pass { FWD, DKV, DQ, PASSES };

struct kernel {
    enum slide_cuda_entry entry;
    int rows, threads; /* of a block; rows are keys in DKV */
    size_t shared;
};

struct instance {
    int size; /* the largest head_dim */
    struct kernel pass[PASSES];
};

/* Bytes of BF16 tiles: what a block keeps and what passes by, as the kernels lay them out. */
#define TILES(size, kept, passing) ((size_t)((kept) + (passing)) * SLIDE_FLASH_LD(size) * 2)
#define ROWS SLIDE_FLASH_ROWS
#define THREADS (32 * SLIDE_FLASH_WARPS)

static const struct instance bf16[] = {
#define X(size, ft, fc, fs, kt, kc, ks, qt, qc, qs)                                                \
    {size,                                                                                         \
     {{SLIDE_ENTRY_slide_k_flash_fwd_bf16_##size, ROWS(ft, fs), THREADS,                           \
       TILES(size, ROWS(ft, fs), 2 * (fc))},                                                       \
      {SLIDE_ENTRY_slide_k_flash_dkv_bf16_##size, ROWS(kt, ks), THREADS,                           \
       TILES(size, 2 * ROWS(kt, ks), 3 * (kc)) + (size_t)(kc) * 2 * 3 * 4},                        \
      {SLIDE_ENTRY_slide_k_flash_dq_bf16_##size, ROWS(qt, qs), THREADS,                            \
       TILES(size, 2 * ROWS(qt, qs), 2 * (qc)) + (size_t)ROWS(qt, qs) * 2 * 4}}},
    SLIDE_FLASH_BF16(X)
#undef X
};

/* The same in FP32, with room for the block's scores. */
#define F32(size, rows, cols, kept)                                                                \
    (((size_t)((kept) * (rows)) + (cols)) * SLIDE_FLASH_F32_LD(size) +                             \
     (size_t)(rows) * ((cols) + 4)) *                                                              \
        4

static const struct instance f32[] = {
#define X(size, rows, cols, each)                                                                  \
    {size,                                                                                         \
     {{SLIDE_ENTRY_slide_k_flash_fwd_f32_##size, rows, SLIDE_FLASH_F32_THREADS(rows, each),        \
       F32(size, rows, cols, 1)},                                                                  \
      {SLIDE_ENTRY_slide_k_flash_dkv_f32_##size, rows, SLIDE_FLASH_F32_THREADS(rows, each),        \
       F32(size, rows, cols, 2)},                                                                  \
      {SLIDE_ENTRY_slide_k_flash_dq_f32_##size, rows, SLIDE_FLASH_F32_THREADS(rows, each),         \
       F32(size, rows, cols, 2)}}},
    SLIDE_FLASH_F32(X)
#undef X
};

static const struct instance *find(const struct slide_attn *a, struct slide_err *err)
{
    bool half = a->dtype == SLIDE_BF16;
    const struct instance *i = half ? bf16 : f32;
    const struct instance *end =
        half ? bf16 + sizeof bf16 / sizeof *bf16 : f32 + sizeof f32 / sizeof *f32;
    if (!half && a->dtype != SLIDE_F32)
        slide_err_set(err, SLIDE_EINVAL, "attention of dtype %d: F32 or BF16", (int)a->dtype);
    else
        for (; i < end; i++)
            if (a->head_dim <= i->size)
                return i;
    slide_err_set(err, SLIDE_EINVAL, "attention of head_dim %d: at most %d", a->head_dim,
                  SLIDE_FLASH_MAX);
    return NULL;
}

/* A block a (row, head) and block of tokens. */
static int start(struct slide_lane *lane, const struct kernel *k, int heads,
                 const struct slide_flash_args *f, struct slide_err *err)
{
    const struct slide_attn *a = &f->a;
    if (k->shared > lane->device->shared_max)
        return slide_err_set(err, SLIDE_EDEVICE,
                             "attention of head_dim %d needs %zu bytes of shared memory, the GPU "
                             "gives %zu",
                             a->head_dim, k->shared, lane->device->shared_max);
    struct slide_cuda_grid grid = {.x = (unsigned)a->rows * (unsigned)heads,
                                   .y = ((unsigned)a->seq + (unsigned)k->rows - 1) /
                                        (unsigned)k->rows,
                                   .z = 1,
                                   .threads = (unsigned)k->threads,
                                   .shared = (unsigned)k->shared};
    return slide_cuda_start(lane, k->entry, &grid, f, err);
}

static size_t delta_bytes(const struct slide_attn *a)
{
    return (size_t)a->rows * (size_t)a->heads * (size_t)a->seq * sizeof(float);
}

size_t slide_cuda_flash_workspace(struct slide_device *device, const struct slide_attn *attn)
{
    (void)device;
    return delta_bytes(attn);
}

int slide_cuda_flash_fwd(struct slide_lane *lane, const struct slide_attn *attn,
                         struct slide_err *err)
{
    struct slide_flash_args f = {.a = *attn};
    const struct instance *i = find(attn, err);
    if (!i)
        return -1;
    if (!attn->rows || !attn->seq)
        return 0;
    return start(lane, &i->pass[FWD], attn->heads, &f, err);
}

int slide_cuda_flash_bwd(struct slide_lane *lane, const struct slide_attn *attn,
                         struct slide_err *err)
{
    struct slide_flash_args f = {.a = *attn, .delta = attn->workspace};
    const struct instance *i = find(attn, err);
    if (!i)
        return -1;
    if (!attn->rows || !attn->seq)
        return 0;
    if (attn->workspace_bytes < delta_bytes(attn))
        return slide_err_set(err, SLIDE_EINVAL, "attention: a workspace of %zu bytes, not %zu",
                             attn->workspace_bytes, delta_bytes(attn));
    uint64_t vectors = (uint64_t)attn->rows * (uint64_t)attn->seq * (uint64_t)attn->heads;
    struct slide_cuda_grid grid = {
        .x = (unsigned)((vectors + SLIDE_FLASH_DELTA_WARPS - 1) / SLIDE_FLASH_DELTA_WARPS),
        .y = 1,
        .z = 1,
        .threads = 32 * SLIDE_FLASH_DELTA_WARPS};
    enum slide_cuda_entry delta = attn->dtype == SLIDE_BF16 ? SLIDE_ENTRY_slide_k_flash_delta_bf16
                                                            : SLIDE_ENTRY_slide_k_flash_delta_f32;
    if (slide_cuda_start(lane, delta, &grid, &f, err) ||
        start(lane, &i->pass[DKV], attn->kv_heads, &f, err))
        return -1;
    return start(lane, &i->pass[DQ], attn->heads, &f, err);
}
