/* SwiGLU. Elements moved for one of `cols`: forward 3 (gate, up, out: BF16 6 bytes, F32 12),
 * backward 5 (gate, up, dout, dgate, dup: 10 or 20), each once; so the time is theirs. About 15
 * instructions an element forward and 25 backward hide behind that in BF16 only with exp and the
 * division by the special function unit (exp_for, div_for).
 * A row belongs to gridDim.x / n blocks; a thread takes UNROLL vectors a block apart, whose loads
 * are in flight together. Numbers that a thread overwrites (dgu may be gu) it has read before, and
 * no other thread reads them. */
#include "cuda/kernels/common.cuh"

#define UNROLL 2

/* Row and place in the row of this thread, in vectors of V. */
struct place {
    int64_t row, first, step;
};

INLINE place place_of(int64_t n)
{
    unsigned blocks = gridDim.x / (unsigned)n; /* of a row */
    unsigned row = blockIdx.x / blocks, part = blockIdx.x % blocks;
    return place{row, (int64_t)part * blockDim.x * UNROLL + threadIdx.x,
                 (int64_t)blocks * blockDim.x * UNROLL};
}

template <class T, int V> INLINE void swiglu_fwd(const slide_swiglu_fwd_args &a)
{
    place p = place_of(a.n);
    const T *gate = (const T *)a.gu + p.row * 2 * a.cols, *up = gate + a.cols;
    T *out = (T *)a.out + p.row * a.cols;
    int64_t vecs = a.cols / V;
    for (int64_t i = p.first; i < vecs; i += p.step) {
        piece<T, V> g[UNROLL], u[UNROLL];
#pragma unroll
        for (int k = 0; k < UNROLL; k++)
            if (i + k * blockDim.x < vecs) {
                g[k] = load_piece<V>(gate + (i + k * blockDim.x) * V);
                u[k] = load_piece<V>(up + (i + k * blockDim.x) * V);
            }
#pragma unroll
        for (int k = 0; k < UNROLL; k++)
            if (i + k * blockDim.x < vecs) {
                float x[V];
#pragma unroll
                for (int j = 0; j < V; j++) {
                    float y = get(g[k], j);
                    float silu = div_for<T>(y, 1.0f + exp_for<T>(-y));
                    x[j] = round_to<T>(silu) * get(u[k], j);
                }
                store_f32s(out + (i + k * blockDim.x) * V, x);
            }
    }
}

template <class T, int V> INLINE void swiglu_bwd(const slide_swiglu_bwd_args &a)
{
    place p = place_of(a.n);
    const T *gate = (const T *)a.gu + p.row * 2 * a.cols, *up = gate + a.cols;
    const T *dout = (const T *)a.dout + p.row * a.cols;
    T *dgate = (T *)a.dgu + p.row * 2 * a.cols, *dup = dgate + a.cols;
    int64_t vecs = a.cols / V;
    for (int64_t i = p.first; i < vecs; i += p.step) {
        piece<T, V> g[UNROLL], u[UNROLL], d[UNROLL];
#pragma unroll
        for (int k = 0; k < UNROLL; k++)
            if (i + k * blockDim.x < vecs) {
                g[k] = load_piece<V>(gate + (i + k * blockDim.x) * V);
                u[k] = load_piece<V>(up + (i + k * blockDim.x) * V);
                d[k] = load_piece<V>(dout + (i + k * blockDim.x) * V);
            }
#pragma unroll
        for (int k = 0; k < UNROLL; k++)
            if (i + k * blockDim.x < vecs) {
                float dg[V], du[V];
#pragma unroll
                for (int j = 0; j < V; j++) {
                    float x = get(g[k], j), y = get(d[k], j);
                    float s = div_for<T>(1.0f, 1.0f + exp_for<T>(-x));
                    dg[j] = y * get(u[k], j) * s * (1.0f + x * (1.0f - s));
                    du[j] = y * (x * s);
                }
                store_f32s(dgate + (i + k * blockDim.x) * V, dg);
                store_f32s(dup + (i + k * blockDim.x) * V, du);
            }
    }
}

template <class T> INLINE void swiglu_fwd_any(const slide_swiglu_fwd_args &a)
{
    constexpr int V = vec<T>::size;
    if (aligned16(a.gu) && aligned16(a.out) && a.cols % V == 0)
        swiglu_fwd<T, V>(a);
    else
        swiglu_fwd<T, 1>(a);
}

template <class T> INLINE void swiglu_bwd_any(const slide_swiglu_bwd_args &a)
{
    constexpr int V = vec<T>::size;
    if (aligned16(a.gu) && aligned16(a.dout) && aligned16(a.dgu) && a.cols % V == 0)
        swiglu_bwd<T, V>(a);
    else
        swiglu_bwd<T, 1>(a);
}

ENTRY slide_k_swiglu_fwd_f32(slide_swiglu_fwd_args a)
{
    swiglu_fwd_any<float>(a);
}

ENTRY slide_k_swiglu_fwd_bf16(slide_swiglu_fwd_args a)
{
    swiglu_fwd_any<bf16>(a);
}

ENTRY slide_k_swiglu_bwd_f32(slide_swiglu_bwd_args a)
{
    swiglu_bwd_any<float>(a);
}

ENTRY slide_k_swiglu_bwd_bf16(slide_swiglu_bwd_args a)
{
    swiglu_bwd_any<bf16>(a);
}
