/* What all kernels share: number formats, 16-byte vectors, sums over a warp and a block. Everything
 * that is not plain C of CUDA goes through a function here, so that the kernel tests can compile
 * the same sources for a CPU (SLIDE_EMULATE, tests/emulator/).
 * Sums have a fixed order: the butterfly over 32 lanes, then the warps in order.
 * Threads: as each kernel says. Blocks: never the host. */
#ifndef SLIDE_CUDA_KERNELS_COMMON_CUH
#define SLIDE_CUDA_KERNELS_COMMON_CUH

#ifdef SLIDE_EMULATE
#include "emulate.h"
#else
/* Dynamic shared memory of the block, 16-byte aligned. */
extern __shared__ uint4 slide_shared[];
#define SHARED_DYNAMIC(type, name) type *name = (type *)(void *)slide_shared
#endif

#include "device/kernel_args.h"

#define WARP 32
#define ENTRY extern "C" __global__ void
#define INLINE static __device__ __forceinline__

/* A BF16 number as memory has it. */
struct bf16 {
    uint16_t bits;
};

INLINE float as_f32(float x)
{
    return x;
}

INLINE float as_f32(bf16 x)
{
    return __uint_as_float((unsigned)x.bits << 16);
}

/* To nearest even; NaN stays NaN: slide_f32_to_bf16. */
template <class T> INLINE T from_f32(float x);

template <> __device__ __forceinline__ float from_f32<float>(float x)
{
    return x;
}

template <> __device__ __forceinline__ bf16 from_f32<bf16>(float x)
{
    bf16 out;
#ifdef SLIDE_EMULATE
    out.bits = slide_f32_to_bf16(x);
#else
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(out.bits) : "f"(x));
#endif
    return out;
}

/* Rounded to the precision of T, as FP32. */
template <class T> INLINE float round_to(float x)
{
    return as_f32(from_f32<T>(x));
}

/* 16 bytes of T: what a thread loads and stores at a time. */
template <class T> struct alignas(16) vec {
    static constexpr int size = 16 / (int)sizeof(T);
    T at[size];
};

template <class T> INLINE vec<T> load_vec(const T *p)
{
    return *(const vec<T> *)p;
}

template <class T> INLINE void store_vec(T *p, const vec<T> &v)
{
    *(vec<T> *)p = v;
}

/* x rounded to T. */
template <class T> INLINE vec<T> to_vec(const float (&x)[vec<T>::size])
{
    vec<T> v;
#pragma unroll
    for (int i = 0; i < vec<T>::size; i++)
        v.at[i] = from_f32<T>(x[i]);
    return v;
}

#ifndef SLIDE_EMULATE
/* The same, two numbers an instruction. */
template <> __device__ __forceinline__ vec<bf16> to_vec<bf16>(const float (&x)[8])
{
    unsigned pair[4];
#pragma unroll
    for (int i = 0; i < 4; i++)
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair[i]) : "f"(x[2 * i + 1]), "f"(x[2 * i]));
    vec<bf16> v;
    memcpy(&v, pair, sizeof v);
    return v;
}
#endif

/* V numbers as memory has them, so that loads can be in flight before the first is converted; V is
 * vec<T>::size (16 bytes) or 1. Numbers come out by get(piece, i). */
template <class T, int V> struct alignas(sizeof(T) * V) piece {
    T at[V];
};

/* In words: as 8 numbers of 16 bits the compiler keeps a register for each. */
template <> struct alignas(16) piece<bf16, 8> {
    unsigned word[4];
};

template <class T, int V> INLINE float get(const piece<T, V> &p, int i)
{
    return as_f32(p.at[i]);
}

INLINE float get(const piece<bf16, 8> &p, int i)
{
    unsigned word = p.word[i / 2];
    return __uint_as_float(i % 2 ? word & 0xffff0000u : word << 16);
}

template <int V, class T> INLINE piece<T, V> load_piece(const T *p)
{
    return *(const piece<T, V> *)p;
}

template <class T, int V> INLINE void widen(const piece<T, V> &from, float (&x)[V])
{
#pragma unroll
    for (int i = 0; i < V; i++)
        x[i] = get(from, i);
}

/* V numbers at p as FP32. V is 1, or a number of whole 16-byte vectors where p is 16-byte aligned.
 */
template <class T, int V> INLINE void load_f32s(const T *p, float (&x)[V])
{
    constexpr int size = vec<T>::size;
    if constexpr (V == 1) {
        x[0] = as_f32(*p);
    } else {
#pragma unroll
        for (int i = 0; i < V / size; i++) {
            piece<T, size> v = load_piece<size>(p + i * size);
#pragma unroll
            for (int k = 0; k < size; k++)
                x[i * size + k] = get(v, k);
        }
    }
}

template <class T, int V> INLINE void store_f32s(T *p, const float (&x)[V])
{
    constexpr int size = vec<T>::size;
    if constexpr (V == 1) {
        *p = from_f32<T>(x[0]);
    } else {
#pragma unroll
        for (int i = 0; i < V / size; i++) {
            float part[size];
#pragma unroll
            for (int k = 0; k < size; k++)
                part[k] = x[i * size + k];
            store_vec(p + i * size, to_vec<T>(part));
        }
    }
}

/* e^x and a / b as exact as T can show. BF16: relative error below 2e-6 for |x| < 24 and 7e-6 for
 * every x (x * log2 e is rounded to FP32), where BF16 rounds by up to 2e-3. */
template <class T> INLINE float exp_for(float x)
{
    if constexpr (sizeof(T) == 2)
        return __expf(x);
    else
        return expf(x);
}

template <class T> INLINE float div_for(float a, float b)
{
    if constexpr (sizeof(T) == 2)
        return __fdividef(a, b);
    else
        return a / b;
}

INLINE bool aligned16(const void *p)
{
    return ((uintptr_t)p & 15) == 0;
}

/* The sum over the warp, the same bits in every lane. All 32 lanes take part. */
INLINE float warp_sum(float x)
{
#pragma unroll
    for (int lane = WARP / 2; lane; lane /= 2)
        x += __shfl_xor_sync(0xffffffffu, x, lane);
    return x;
}

INLINE float warp_max(float x)
{
#pragma unroll
    for (int lane = WARP / 2; lane; lane /= 2)
        x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, lane));
    return x;
}

/* The sum over a block of `threads` (a multiple of 32, at most 1024), in every thread. `room`: 32
 * floats of shared memory that nobody else uses; the block is in step afterwards. */
INLINE float block_sum(float x, float *room, int threads)
{
    x = warp_sum(x);
    __syncthreads();
    if (threadIdx.x % WARP == 0)
        room[threadIdx.x / WARP] = x;
    __syncthreads();
    float sum = 0;
    for (int w = 0; w < threads / WARP; w++)
        sum += room[w];
    return sum;
}

INLINE float block_max(float x, float *room, int threads)
{
    x = warp_max(x);
    __syncthreads();
    if (threadIdx.x % WARP == 0)
        room[threadIdx.x / WARP] = x;
    __syncthreads();
    float most = room[0];
    for (int w = 1; w < threads / WARP; w++)
        most = fmaxf(most, room[w]);
    return most;
}

#endif
