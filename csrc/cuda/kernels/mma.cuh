/* Tensor cores and asynchronous copies: the warp-wide instructions that CUDA C has no functions
 * for, one wrapper each. Every one runs on sm_80 and later; wgmma and TMA would be faster on
 * Hopper only, and cuDNN has those. Under SLIDE_EMULATE each is computed lane by lane from the
 * fragment layouts of the PTX ISA (mma.m16n8k16, ldmatrix), and a copy happens no sooner than its
 * wait, so that a missing wait shows.
 * Fragments, with g = lane / 4 and t = lane % 4 (an unsigned holds two BF16, the lower index low):
 *   A 16x16: a[0] = (g, 2t..2t+1), a[1] = (g + 8, 2t..), a[2] = (g, 2t + 8..), a[3] = (g + 8, ..)
 *   B 16x8:  b0 = (2t..2t+1, g), b1 = (2t + 8.., g)
 *   C 16x8:  c[0..1] = (g, 2t..2t+1), c[2..3] = (g + 8, 2t..2t+1)
 * Called by flash_tile.cuh; all lanes of a warp take part. */
#ifndef SLIDE_CUDA_KERNELS_MMA_CUH
#define SLIDE_CUDA_KERNELS_MMA_CUH

#include "cuda/kernels/common.cuh"

/* A place in shared memory as the instructions take it; add bytes. 32 bits, so that the compiler
 * folds constant offsets into the instruction. */
#ifdef SLIDE_EMULATE
typedef unsigned char *shared_at;
INLINE shared_at shared_of(const void *p)
{
    return (shared_at)p;
}
#else
typedef unsigned shared_at;
INLINE shared_at shared_of(const void *p)
{
    return (unsigned)__cvta_generic_to_shared(p);
}
#endif

/* 2^x, within 2 ulp; -inf gives 0. */
INLINE float exp2_fast(float x)
{
#ifdef SLIDE_EMULATE
    return std::exp2(x);
#else
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#endif
}

/* Both to nearest even, as from_f32. */
INLINE unsigned pack_bf16(float low, float high)
{
#ifdef SLIDE_EMULATE
    return (unsigned)slide_f32_to_bf16(low) | (unsigned)slide_f32_to_bf16(high) << 16;
#else
    unsigned pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
#endif
}

#ifdef SLIDE_EMULATE
struct mma_shown {
    unsigned a[4], b[2];
};

INLINE float mma_element(unsigned pair, int i)
{
    return slide_bf16_to_f32((uint16_t)(i % 2 ? pair >> 16 : pair));
}
#endif

/* c += a b, in FP32. */
INLINE void mma_bf16(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1)
{
#ifdef SLIDE_EMULATE
    mma_shown mine = {{a[0], a[1], a[2], a[3]}, {b0, b1}};
    const unsigned char *all = emu::exchange(0xffffffffu, &mine, sizeof mine);
    unsigned g = emu::lane() / 4, t = emu::lane() % 4;
    mma_shown left[4], right[2][4]; /* rows g and g + 8 lie in g's lanes; columns 2t and 2t + 1 */
    for (unsigned q = 0; q < 4; q++) {
        left[q] = emu::of_lane<mma_shown>(all, 4 * g + q);
        right[0][q] = emu::of_lane<mma_shown>(all, 4 * (2 * t) + q);
        right[1][q] = emu::of_lane<mma_shown>(all, 4 * (2 * t + 1) + q);
    }
    for (int e = 0; e < 4; e++)
        for (int k = 0; k < 16; k++)
            c[e] += mma_element(left[k % 8 / 2].a[e / 2 + 2 * (k / 8)], k) *
                    mma_element(right[e % 2][k % 8 / 2].b[k / 8], k);
#else
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, "
                 "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}

/* Four 8x8 matrices of BF16. Lane l names 16 bytes, row l % 8 of matrix l / 8; out[i] is the pair
 * (g, 2t..2t+1) of matrix i. */
INLINE void ldmatrix(unsigned (&out)[4], shared_at row)
{
#ifdef SLIDE_EMULATE
    const unsigned char *all = emu::exchange(0xffffffffu, emu::aligned(row, 16), 16);
    for (unsigned i = 0; i < 4; i++)
        std::memcpy(&out[i],
                    all + (8 * i + emu::lane() / 4) * emu::EXCHANGE + 4 * (emu::lane() % 4), 4);
#else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(row)
                 : "memory");
#endif
}

/* The same, each matrix transposed: out[i] is (2t..2t+1, g) of matrix i. */
INLINE void ldmatrix_trans(unsigned (&out)[4], shared_at row)
{
#ifdef SLIDE_EMULATE
    const unsigned char *all = emu::exchange(0xffffffffu, emu::aligned(row, 16), 16);
    for (unsigned i = 0; i < 4; i++) {
        uint16_t pair[2];
        for (unsigned e = 0; e < 2; e++)
            std::memcpy(&pair[e],
                        all + (8 * i + 2 * (emu::lane() % 4) + e) * emu::EXCHANGE +
                            2 * (emu::lane() / 4),
                        2);
        std::memcpy(&out[i], pair, 4);
    }
#else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(row)
                 : "memory");
#endif
}

/* Starts a copy of 16 aligned bytes to shared memory, past L1; zeros if not `valid`, and then
 * `from` is not read. */
INLINE void copy16_start(shared_at to, const void *from, bool valid)
{
#ifdef SLIDE_EMULATE
    emu::copy_later(emu::aligned(to, 16), valid ? emu::aligned(from, 16) : nullptr, 16);
#else
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to),
                 "l"(__cvta_generic_to_global(from)), "r"(valid ? 16 : 0)
                 : "memory");
#endif
}

/* 4 aligned bytes. */
INLINE void copy4_start(shared_at to, const void *from, bool valid)
{
#ifdef SLIDE_EMULATE
    emu::copy_later(emu::aligned(to, 4), valid ? emu::aligned(from, 4) : nullptr, 4);
#else
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to),
                 "l"(__cvta_generic_to_global(from)), "r"(valid ? 4 : 0)
                 : "memory");
#endif
}

/* Waits for all copies that this thread started; a barrier must follow before other threads'. */
INLINE void copy_wait()
{
#ifdef SLIDE_EMULATE
    emu::copy_now();
#else
    asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

#endif
