/* Embedding, forward and backward.
 * Forward: a copy of rows, BF16 4 bytes an element, F32 8.
 * Backward: moved are dout once (BF16 2 bytes an element) and each row of dtable that occurs, read
 * and written (8 bytes an element), and nothing more: a row's tokens are added up in registers. The
 * order of a sum is the CPU's, dtable and then the tokens as they come, so the bits are the same.
 * gridDim.x (a power of two) classes of ids have a block each, times the groups of columns. A block
 * goes through all ids, which the L2 cache holds, and lists those of its class in shared memory; a
 * warp takes the first of the listed tokens with the same id and adds the others' rows to it. The
 * searching costs about 10 % at 65,536 tokens and little at 16,384. One id in most of the tokens is
 * the slow case: its few blocks add row after row. */
#include "cuda/kernels/common.cuh"

#define COPIES 4     /* vectors that a thread copies */
#define THREADS 256  /* of a backward block */
#define LIST 2048    /* tokens that a block remembers */
#define PER_THREAD 4 /* ids that a thread looks at */
#define SPANS 4      /* parts of 32 vectors in a group of columns */
#define ROWS 4       /* rows of dout in flight */

template <class T, int V> INLINE void embed_fwd(const slide_embed_fwd_args &a)
{
    unsigned blocks = gridDim.x / (unsigned)a.n; /* of a token */
    unsigned t = blockIdx.x / blocks, part = blockIdx.x % blocks;
    const T *from = (const T *)a.table + (int64_t)a.ids[t] * a.cols;
    T *to = (T *)a.out + (int64_t)t * a.cols;
    unsigned vecs = (unsigned)a.cols / V, step = blocks * blockDim.x * COPIES;
    for (unsigned i = part * blockDim.x * COPIES + threadIdx.x; i < vecs; i += step) {
        piece<T, V> x[COPIES];
#pragma unroll
        for (int k = 0; k < COPIES; k++)
            if (i + k * blockDim.x < vecs)
                x[k] = load_piece<V>(from + (int64_t)(i + k * blockDim.x) * V);
#pragma unroll
        for (int k = 0; k < COPIES; k++)
            if (i + k * blockDim.x < vecs)
                *(piece<T, V> *)(to + (int64_t)(i + k * blockDim.x) * V) = x[k];
    }
}

template <class T> INLINE void embed_fwd_any(const slide_embed_fwd_args &a)
{
    constexpr int V = vec<T>::size;
    if (aligned16(a.table) && aligned16(a.out) && a.cols % V == 0)
        embed_fwd<T, V>(a);
    else
        embed_fwd<T, 1>(a);
}

ENTRY slide_k_embed_fwd_f32(slide_embed_fwd_args a)
{
    embed_fwd_any<float>(a);
}

ENTRY slide_k_embed_fwd_bf16(slide_embed_fwd_args a)
{
    embed_fwd_any<bf16>(a);
}

/* What a block knows of the tokens of its class, in their order. */
struct listed {
    int32_t id[LIST], token[LIST];
    int found[THREADS / WARP]; /* by each warp, in this round */
};

/* Adds this round's tokens of the block's class to the list; the new length, in every thread. */
INLINE int gather(const slide_embed_bwd_args &a, listed *l, int length, int64_t first)
{
    unsigned lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    int64_t t = first + (int64_t)threadIdx.x * PER_THREAD;
    int32_t id[PER_THREAD];
    unsigned mine = 0, before = 0, found = 0;
#pragma unroll
    for (int k = 0; k < PER_THREAD; k++)
        id[k] = t + k < a.n ? a.ids[t + k] : a.skip;
#pragma unroll
    for (int k = 0; k < PER_THREAD; k++) {
        bool hit =
            t + k < a.n && id[k] != a.skip && ((unsigned)id[k] & (gridDim.x - 1)) == blockIdx.x;
        unsigned hits = __ballot_sync(0xffffffffu, hit);
        mine |= (unsigned)hit << k;
        before += __popc(hits & ((1u << lane) - 1));
        found += __popc(hits);
    }
    if (lane == 0)
        l->found[warp] = (int)found;
    __syncthreads();
    int at = length + (int)before;
    for (unsigned w = 0; w < THREADS / WARP; w++) {
        at += w < warp ? l->found[w] : 0;
        length += l->found[w];
    }
#pragma unroll
    for (int k = 0; k < PER_THREAD; k++)
        if (mine >> k & 1) {
            l->id[at] = id[k];
            l->token[at++] = (int32_t)(t + k);
        }
    __syncthreads();
    return length;
}

/* Whether an entry before e has its id. Called by whole warps, as is add_rows. */
INLINE bool repeated(const listed *l, int e)
{
    int lane = threadIdx.x % WARP;
    for (int end = e; end > 0; end -= WARP) {
        int i = end - 1 - lane;
        if (__any_sync(0xffffffffu, i >= 0 && l->id[i] == l->id[e]))
            return true;
    }
    return false;
}

/* Columns c to c + V of the entries from e on that have its id. */
template <class T, int V>
INLINE void add_rows(const slide_embed_bwd_args &a, const listed *l, int length, int e, int64_t c)
{
    int lane = threadIdx.x % WARP;
    bool inside = c < a.cols;
    const T *dout = (const T *)a.dout + (inside ? c : 0);
    float *row = a.dtable + (int64_t)l->id[e] * a.cols + (inside ? c : 0);
    float sum[V];
    load_f32s(row, sum);
    for (int i = e; i < length; i += WARP) {
        unsigned same =
            __ballot_sync(0xffffffffu, i + lane < length && l->id[i + lane] == l->id[e]);
        while (same) {
            piece<T, V> x[ROWS];
            int count = 0;
#pragma unroll
            for (int k = 0; k < ROWS; k++)
                if (same) {
                    int token = l->token[i + __ffs((int)same) - 1];
                    same &= same - 1;
                    x[k] = load_piece<V>(dout + (int64_t)token * a.cols);
                    count = k + 1;
                }
#pragma unroll
            for (int k = 0; k < ROWS; k++)
                if (k < count)
#pragma unroll
                    for (int j = 0; j < V; j++)
                        sum[j] += get(x[k], j);
        }
    }
    if (inside)
        store_f32s(row, sum);
}

template <class T, int V> INLINE void add_list(const slide_embed_bwd_args &a, listed *l, int length)
{
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    constexpr int W = vec<T>::size; /* a span's vectors, also where V is 1 */
    for (int i = warp; i < length * SPANS; i += THREADS / WARP) {
        int e = i / SPANS;
        int64_t from = ((int64_t)blockIdx.y * SPANS + i % SPANS) * WARP * W;
        if (from >= a.cols || repeated(l, e))
            continue;
        for (int k = 0; k < W / V; k++)
            add_rows<T, V>(a, l, length, e, from + (k * WARP + lane) * V);
    }
    __syncthreads();
}

template <class T> INLINE void embed_bwd(const slide_embed_bwd_args &a)
{
    __shared__ listed l;
    constexpr int V = vec<T>::size, round = THREADS * PER_THREAD;
    bool whole = aligned16(a.dout) && aligned16(a.dtable) && a.cols % V == 0;
    int length = 0;
    for (int64_t t = 0; t < a.n; t += round) {
        length = gather(a, &l, length, t);
        if (length > LIST - round || t + round >= a.n) {
            if (whole)
                add_list<T, V>(a, &l, length);
            else
                add_list<T, 1>(a, &l, length);
            length = 0;
        }
    }
}

ENTRY __launch_bounds__(THREADS, 4) slide_k_embed_bwd_f32(slide_embed_bwd_args a)
{
    embed_bwd<float>(a);
}

ENTRY __launch_bounds__(THREADS, 4) slide_k_embed_bwd_bf16(slide_embed_bwd_args a)
{
    embed_bwd<bf16>(a);
}
