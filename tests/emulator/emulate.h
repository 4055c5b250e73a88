// CUDA C on a CPU, for tests: enough of the language that csrc/cuda/kernels/*.cu compile as C++ and
// compute what they would on a GPU. A thread of a block is a fiber; the fibers of a block take turns
// at barriers and warp exchanges, so a kernel runs step by step, in a fixed order, on one CPU. It
// finds wrong results, missing or divergent barriers (it stops with a message), and out-of-bounds
// accesses as far as ASan does. It does not find races between warps, and says nothing about speed.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "fake_cuda.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __restrict__
// A block's fibers share one OS thread, so this is memory that the block shares.
#define __shared__ static thread_local

struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct alignas(16) int4 {
    int x, y, z, w;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(8) float2 {
    float x, y;
};
struct uint3 {
    unsigned x, y, z;
};

static inline float4 make_float4(float x, float y, float z, float w)
{
    return float4{x, y, z, w};
}
static inline float2 make_float2(float x, float y)
{
    return float2{x, y};
}
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w)
{
    return uint4{x, y, z, w};
}
static inline uint2 make_uint2(unsigned x, unsigned y)
{
    return uint2{x, y};
}

namespace emu {

constexpr unsigned EXCHANGE = 64; // bytes a lane may show to its warp at a time

struct place { // where the running fiber is
    uint3 thread, block, block_dim, grid_dim;
};
place &here();
void sync_block();
void sync_warp(unsigned mask);
// Shows `bytes` of `mine` to the lanes of `mask`, and returns all lanes' (EXCHANGE bytes apart).
// Valid until the lane's next exchange.
const unsigned char *exchange(unsigned mask, const void *mine, size_t bytes);
void *shared_memory();
unsigned lane();
// An asynchronous copy of at most 16 bytes (from NULL: zeros): it happens in this thread's next
// copy_now, the latest moment that the hardware allows.
void copy_later(void *to, const void *from, size_t bytes);
void copy_now();
// p, or a stop with a message where the hardware would trap.
void stop_misaligned(const void *p, size_t bytes);

template <class T> inline T *aligned(T *p, size_t bytes)
{
    if ((uintptr_t)p % bytes)
        stop_misaligned(p, bytes);
    return p;
}

template <class T> inline T of_lane(const unsigned char *all, unsigned lane)
{
    T value;
    std::memcpy(&value, all + lane % 32 * EXCHANGE, sizeof value);
    return value;
}

inline void launch(uint3 grid, uint3 block, size_t shared, void (*fn)(const void *args),
                   const void *args)
{
    const unsigned g[] = {grid.x, grid.y, grid.z}, b[] = {block.x, block.y, block.z};
    launch(g, b, shared, fn, args);
}

} // namespace emu

#define threadIdx (emu::here().thread)
#define blockIdx (emu::here().block)
#define blockDim (emu::here().block_dim)
#define gridDim (emu::here().grid_dim)
#define SHARED_DYNAMIC(type, name) type *name = (type *)emu::shared_memory()

static inline void __syncthreads()
{
    emu::sync_block();
}
static inline void __syncwarp(unsigned mask = 0xffffffffu)
{
    emu::sync_warp(mask);
}
template <class T> static inline T __shfl_xor_sync(unsigned mask, T x, int lanes, int = 32)
{
    return emu::of_lane<T>(emu::exchange(mask, &x, sizeof x), emu::lane() ^ (unsigned)lanes);
}
template <class T> static inline T __shfl_sync(unsigned mask, T x, int from, int width = 32)
{
    unsigned base = emu::lane() / (unsigned)width * (unsigned)width;
    return emu::of_lane<T>(emu::exchange(mask, &x, sizeof x),
                           base + (unsigned)from % (unsigned)width);
}
template <class T> static inline T __shfl_down_sync(unsigned mask, T x, unsigned by, int = 32)
{
    unsigned lane = emu::lane();
    return emu::of_lane<T>(emu::exchange(mask, &x, sizeof x), lane + by < 32 ? lane + by : lane);
}
template <class T> static inline T __shfl_up_sync(unsigned mask, T x, unsigned by, int = 32)
{
    unsigned lane = emu::lane();
    return emu::of_lane<T>(emu::exchange(mask, &x, sizeof x), lane >= by ? lane - by : lane);
}
static inline unsigned __ballot_sync(unsigned mask, int predicate)
{
    const unsigned char *all = emu::exchange(mask, &predicate, sizeof predicate);
    unsigned bits = 0;
    for (unsigned i = 0; i < 32; i++)
        bits |= (mask >> i & 1 && emu::of_lane<int>(all, i) ? 1u : 0u) << i;
    return bits;
}
static inline int __any_sync(unsigned mask, int predicate)
{
    return __ballot_sync(mask, predicate) != 0;
}
static inline int __all_sync(unsigned mask, int predicate)
{
    return __ballot_sync(mask, predicate) == mask;
}

static inline float __uint_as_float(unsigned bits)
{
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}
static inline unsigned __float_as_uint(float x)
{
    unsigned bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
}
template <class T> static inline T __ldg(const T *p)
{
    return *p;
}
template <class T> static inline T __ldcs(const T *p)
{
    return *p;
}
template <class T> static inline void __stcs(T *p, const T &x)
{
    *p = x;
}
#define __expf(x) std::exp((float)(x)) // glibc has a function of that name
static inline float exp2f_approx(float x)
{
    return std::exp2(x);
}
static inline float __fdividef(float x, float y)
{
    return x / y;
}
static inline float rsqrtf(float x)
{
    return 1.0f / std::sqrt(x);
}
static inline float __fmaf_rn(float a, float b, float c)
{
    return std::fma(a, b, c);
}
static inline float __fmul_rn(float a, float b)
{
    return a * b;
}
static inline float __fadd_rn(float a, float b)
{
    return a + b;
}
static inline float __frcp_rn(float a)
{
    return 1.0f / a;
}
static inline float __fsqrt_rn(float a)
{
    return std::sqrt(a);
}
static inline int min(int a, int b)
{
    return a < b ? a : b;
}
static inline int max(int a, int b)
{
    return a > b ? a : b;
}
static inline int64_t min(int64_t a, int64_t b)
{
    return a < b ? a : b;
}
static inline int64_t max(int64_t a, int64_t b)
{
    return a > b ? a : b;
}
static inline int __clz(int x)
{
    return x ? __builtin_clz((unsigned)x) : 32;
}
static inline int __ffs(int x)
{
    return __builtin_ffs(x);
}
static inline int __popc(unsigned x)
{
    return __builtin_popcount(x);
}
