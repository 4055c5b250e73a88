/* What the host (cuda_flash.c) and the kernels (kernels/flash*.cu) of our own attention share: the
 * arguments, and the instances with their block sizes, one table for both so that grid, shared
 * memory and code can't disagree.
 * An instance serves head sizes up to its own, padded with zeros in shared memory. Blocks are
 * chosen so that two fit a multiprocessor of 227 KB where head_dim <= 128, and one always fits the
 * 99 KB of sm_86, 89 and 120.
 * Threads: plain data. Blocks: never. */
#ifndef SLIDE_CUDA_FLASH_ARGS_H
#define SLIDE_CUDA_FLASH_ARGS_H

#include "device/kernel_args.h"

struct slide_flash_args {
    struct slide_attn a;
    float *delta; /* [rows, heads, seq]: sum over head_dim of d_o * o; backward only */
};

#define SLIDE_FLASH_MAX 512 /* the largest head_dim */

/* BF16, X(size, then for each of fwd, dkv and dq: tiles, cols, split). A block has 4 warps; `split`
 * of them share the same 16 * tiles rows (queries; keys in dkv) and part the head dimension of the
 * result among themselves, so a block has 16 * tiles * 4 / split rows. `cols` (keys; queries in
 * dkv) pass by at a time. Two tiles a warp halve the traffic of shared memory, which bounds these
 * kernels before the tensor cores do; larger heads leave registers for one. */
#define SLIDE_FLASH_BF16(X)                                                                        \
    X(64, 2, 64, 1, 2, 32, 1, 2, 32, 1)                                                            \
    X(96, 2, 64, 1, 1, 64, 1, 2, 32, 1)                                                            \
    X(128, 2, 64, 1, 1, 64, 1, 2, 32, 1)                                                           \
    X(192, 1, 64, 1, 1, 32, 1, 1, 32, 1)                                                           \
    X(256, 1, 32, 1, 1, 32, 2, 1, 16, 1)                                                           \
    X(512, 1, 32, 2, 1, 16, 4, 1, 16, 2)

#define SLIDE_FLASH_WARPS 4
#define SLIDE_FLASH_ROWS(tiles, split) (16 * (tiles) * SLIDE_FLASH_WARPS / (split))
/* Elements between rows in shared memory: an odd number of 16 bytes, so that the 8 rows that
 * ldmatrix reads at a time lie in different banks. */
#define SLIDE_FLASH_LD(size) ((size) + 8)

/* FP32, X(size, rows, cols, each): 8 threads share `each` rows. */
#define SLIDE_FLASH_F32(X)                                                                         \
    X(64, 64, 32, 4)                                                                               \
    X(128, 64, 32, 4)                                                                              \
    X(256, 32, 16, 2)                                                                              \
    X(512, 16, 16, 1)

#define SLIDE_FLASH_F32_LANES 8
#define SLIDE_FLASH_F32_THREADS(rows, each) ((rows) / (each) * SLIDE_FLASH_F32_LANES)
#define SLIDE_FLASH_F32_LD(size) ((size) + 4)

/* Delta: warps a block, a (token, head) each. */
#define SLIDE_FLASH_DELTA_WARPS 8

#endif
