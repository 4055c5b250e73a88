/* Rotation in place. Moved for an element of the rotated part: 2 elements (BF16 4 bytes, F32 8),
 * and 4 bytes of cos and sin for each pair and token, which all heads share: with 40 heads 0.1
 * bytes an element. A thread rotates the same pairs of HEADS heads of a token, so cos and sin are
 * read from the cache once for all of them and 2 * HEADS vectors are in flight. A token with fewer
 * pieces of work than the block has threads shares the block with others. */
#include "cuda/kernels/common.cuh"

#define HEADS 4

template <class T, int V> INLINE void rope(const slide_rope_args &a)
{
    unsigned vecs = (unsigned)a.half / V, items = (unsigned)(a.heads + HEADS - 1) / HEADS * vecs;
    unsigned tokens = items < blockDim.x ? blockDim.x / items : 1; /* of a block */
    unsigned mine = items < blockDim.x ? threadIdx.x / items : 0;
    if (mine >= tokens)
        return;
    float sign = (float)a.sign;
    for (int64_t t = (int64_t)blockIdx.x * tokens + mine; t < a.n; t += (int64_t)gridDim.x * tokens)
        for (unsigned i = threadIdx.x - mine * items; i < items; i += blockDim.x) {
            int head = (int)(i / vecs) * HEADS;
            int64_t c = (int64_t)(i % vecs) * V;
            T *x = (T *)a.x + t * a.stride + (int64_t)head * a.head_dim + c;
            float cosine[V], sine[V];
            piece<T, V> low[HEADS], high[HEADS];
            load_f32s(a.cos + t * a.half + c, cosine);
            load_f32s(a.sin + t * a.half + c, sine);
#pragma unroll
            for (int h = 0; h < HEADS; h++)
                if (head + h < a.heads) {
                    low[h] = load_piece<V>(x + (int64_t)h * a.head_dim);
                    high[h] = load_piece<V>(x + (int64_t)h * a.head_dim + a.half);
                }
#pragma unroll
            for (int h = 0; h < HEADS; h++)
                if (head + h < a.heads) {
                    float l[V], u[V];
#pragma unroll
                    for (int k = 0; k < V; k++) {
                        float from_l = get(low[h], k), from_u = get(high[h], k);
                        float s = sine[k] * sign;
                        l[k] = from_l * cosine[k] - from_u * s;
                        u[k] = from_u * cosine[k] + from_l * s;
                    }
                    store_f32s(x + (int64_t)h * a.head_dim, l);
                    store_f32s(x + (int64_t)h * a.head_dim + a.half, u);
                }
        }
}

template <class T> INLINE void rope_any(const slide_rope_args &a)
{
    constexpr int V = vec<T>::size;
    if (aligned16(a.x) && aligned16(a.cos) && aligned16(a.sin) && a.half % V == 0 &&
        a.head_dim % V == 0 && a.stride % V == 0)
        rope<T, V>(a);
    else
        rope<T, 1>(a);
}

ENTRY slide_k_rope_f32(slide_rope_args a)
{
    rope_any<float>(a);
}

ENTRY slide_k_rope_bf16(slide_rope_args a)
{
    rope_any<bf16>(a);
}
