/* Softmax cross-entropy, one block a row. Bytes an element: without a gradient z is read once (BF16
 * 2, F32 4); with one it is read, read again and written (6 or 12), for a row of 151,936 BF16
 * logits, 304 KB, fits no block's shared memory. One block of 1024 threads a multiprocessor keeps
 * 132 rows under way, about 40 MB, so much of the second reading comes from the 50 MB of L2.
 * The first pass carries maximum and sum of each thread along (online softmax). Rows begin anywhere
 * when the vocabulary is no multiple of 8, so a row has a head and a tail beside its vectors. */
#include "cuda/kernels/common.cuh"

#define THREADS 1024
#define UNROLL 4

#define LOWEST (-3.402823466e38f) /* finite, so that -Inf - LOWEST is no NaN */

/* Maximum so far and the sum of e^(z - most). */
struct online {
    float most, sum;
};

template <class T, int V> INLINE void take(online *o, const piece<T, V> &z)
{
    float x[V], top = o->most;
    widen(z, x);
#pragma unroll
    for (int j = 0; j < V; j++)
        top = fmaxf(top, x[j]);
    if (top > o->most) {
        o->sum *= exp_for<T>(o->most - top);
        o->most = top;
    }
    float part = 0;
#pragma unroll
    for (int j = 0; j < V; j++)
        part += exp_for<T>(x[j] - top);
    o->sum += part;
}

/* Where the vectors of a row lie: elements before them, and how many there are. */
template <class T> struct cut {
    int head, vecs, tail; /* elements, vectors, first element of the tail */
};

template <class T> INLINE cut<T> cut_row(const T *z, int vocab)
{
    constexpr int V = vec<T>::size;
    int head = (int)((16 - ((uintptr_t)z & 15)) & 15) / (int)sizeof(T);
    head = min(head, vocab);
    int vecs = (vocab - head) / V;
    return cut<T>{head, vecs, head + vecs * V};
}

template <class T> INLINE online scan(const T *z, int vocab)
{
    constexpr int V = vec<T>::size;
    cut<T> row = cut_row(z, vocab);
    online o = {LOWEST, 0};
    int tid = (int)threadIdx.x;
    if (tid < row.head)
        take(&o, load_piece<1>(z + tid));
    if (row.tail + tid < vocab)
        take(&o, load_piece<1>(z + row.tail + tid));
    const T *body = z + row.head;
    int i = tid;
    for (; i + (UNROLL - 1) * THREADS < row.vecs; i += UNROLL * THREADS) {
        piece<T, V> x[UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; u++)
            x[u] = load_piece<V>(body + (int64_t)(i + u * THREADS) * V);
#pragma unroll
        for (int u = 0; u < UNROLL; u++)
            take(&o, x[u]);
    }
    for (; i < row.vecs; i += THREADS)
        take(&o, load_piece<V>(body + (int64_t)i * V));
    return o;
}

template <class T, int V>
INLINE void put_gradient(T *z, const piece<T, V> &raw, float most, float factor)
{
    float x[V];
    widen(raw, x);
#pragma unroll
    for (int j = 0; j < V; j++)
        x[j] = exp_for<T>(x[j] - most) * factor;
    store_f32s(z, x);
}

template <class T> INLINE void gradient(T *z, int vocab, float most, float factor)
{
    constexpr int V = vec<T>::size;
    cut<T> row = cut_row((const T *)z, vocab);
    int tid = (int)threadIdx.x;
    if (tid < row.head)
        put_gradient(z + tid, load_piece<1>((const T *)z + tid), most, factor);
    T *tail = z + row.tail;
    if (row.tail + tid < vocab)
        put_gradient(tail + tid, load_piece<1>((const T *)tail + tid), most, factor);
    T *body = z + row.head;
    int i = tid;
    for (; i + (UNROLL - 1) * THREADS < row.vecs; i += UNROLL * THREADS) {
        piece<T, V> x[UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; u++)
            x[u] = load_piece<V>((const T *)body + (int64_t)(i + u * THREADS) * V);
#pragma unroll
        for (int u = 0; u < UNROLL; u++)
            put_gradient(body + (int64_t)(i + u * THREADS) * V, x[u], most, factor);
    }
    for (; i < row.vecs; i += THREADS)
        put_gradient(body + (int64_t)i * V, load_piece<V>((const T *)body + (int64_t)i * V), most,
                     factor);
}

template <class T> INLINE void clear(T *z, int vocab)
{
    constexpr int V = vec<T>::size;
    cut<T> row = cut_row((const T *)z, vocab);
    float zero[V] = {}, one[1] = {};
    int tid = (int)threadIdx.x;
    if (tid < row.head)
        store_f32s(z + tid, one);
    if (row.tail + tid < vocab)
        store_f32s(z + row.tail + tid, one);
    for (int i = tid; i < row.vecs; i += THREADS)
        store_f32s(z + row.head + (int64_t)i * V, zero);
}

template <class T> INLINE void ce(const slide_ce_args &a)
{
    __shared__ float room[WARP];
    int64_t r = blockIdx.x;
    T *z = (T *)a.z + r * a.vocab;
    int label = a.labels[r];
    if (label < 0) {
        if (threadIdx.x == 0)
            a.loss[r] = 0;
        if (a.grad)
            clear(z, a.vocab);
        return;
    }
    online o = scan((const T *)z, a.vocab);
    float hit = as_f32(z[label]);
    float most = block_max(o.most, room, THREADS);
    /* A thread without an element has the sum 0, and LOWEST - most is no NaN. */
    float total = block_sum(o.sum * expf(o.most - most), room, THREADS);
    if (threadIdx.x == 0)
        a.loss[r] = logf(total) + most - hit;
    if (!a.grad)
        return;
    gradient(z, a.vocab, most, 1.0f / total * a.scale);
    __syncthreads(); /* over the element of whoever has just written it */
    if (threadIdx.x == 0)
        z[label] = from_f32<T>((expf(hit - most) / total - 1.0f) * a.scale);
}

ENTRY __launch_bounds__(THREADS, 1) slide_k_ce_f32(slide_ce_args a)
{
    ce<float>(a);
}

ENTRY __launch_bounds__(THREADS, 1) slide_k_ce_bf16(slide_ce_args a)
{
    ce<bf16>(a);
}
