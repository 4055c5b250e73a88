/* RMS norm, forward and backward. Elements moved for one of x: forward 2 (x, y: BF16 4 bytes, F32
 * 8); backward 3 (dy, x, dx: 6 or 12), 4 with `add`, each once: a row stays in registers between
 * its sum and its use. Beside that only w, which the caches hold, rstd, and backward the partial
 * sums of dw, written and read once by 4 bytes for SLIDE_NORM_BLOCK elements (8 % at the most; the
 * L2 cache holds them at usual sizes).
 * Two shapes have entries of their own. Wide rows: a block a row forward, a block for
 * SLIDE_NORM_BLOCK tokens backward, so that a thread keeps its columns of dw in registers. Short
 * rows (q and k norm: many vectors of 64 to 256): a team, a power of two of lanes of a warp, for
 * each vector, a 16-byte vector a lane. Rows that are not aligned, or wider than the registers of a
 * block hold (BF16 16,384 elements, F32 8,192), are read twice. */
#include "cuda/kernels/common.cuh"

#define KEPT 4            /* vectors of a row that a thread keeps, forward */
#define ROWS 4            /* short rows that a team has in flight, forward */
#define ROWS_BWD 2        /* backward */
#define THREADS_SHORT 512 /* of a backward block for short rows */

INLINE float rstd_of(float squares, int cols, float eps)
{
    return 1.0f / sqrtf(squares / (float)cols + eps);
}

template <class T, int V> INLINE float squares_of(const piece<T, V> &raw)
{
    float x[V], sum = 0;
    widen(raw, x);
#pragma unroll
    for (int k = 0; k < V; k++)
        sum += x[k] * x[k];
    return sum;
}

template <class T, int V>
INLINE void put_norm(T *y, const piece<T, V> &raw, const piece<T, V> &w, float r)
{
    float x[V];
    widen(raw, x);
#pragma unroll
    for (int k = 0; k < V; k++)
        x[k] = round_to<T>(x[k] * r) * get(w, k);
    store_f32s(y, x);
}

/* Sum over the `lanes` (a power of two) of a team. */
INLINE float team_sum(float x, int lanes)
{
    for (int l = lanes / 2; l; l /= 2)
        x += __shfl_xor_sync(0xffffffffu, x, l);
    return x;
}

/* Lanes of a team for so many columns: enough for a vector each, if there are. */
template <class T> INLINE int team_lanes(int cols)
{
    int lanes = WARP;
    while (lanes > 1 && lanes / 2 * vec<T>::size >= cols)
        lanes /= 2;
    return lanes;
}

/* ---- forward ---- */

template <class T> INLINE bool whole_fwd(const slide_rmsnorm_fwd_args &a)
{
    constexpr int V = vec<T>::size;
    return aligned16(a.x) && aligned16(a.y) && aligned16(a.w) && a.cols % V == 0 &&
           a.x_stride % V == 0 && a.y_stride % V == 0;
}

/* A row that a thread holds KEPT vectors of. */
template <class T>
INLINE float norm_kept(const T *x, const T *w, T *y, int cols, float eps, float *room)
{
    constexpr int V = vec<T>::size;
    int vecs = cols / V, threads = (int)blockDim.x, tid = (int)threadIdx.x;
    piece<T, V> v[KEPT];
    float squares = 0;
#pragma unroll
    for (int k = 0; k < KEPT; k++)
        if (tid + k * threads < vecs)
            v[k] = load_piece<V>(x + (tid + k * threads) * V);
#pragma unroll
    for (int k = 0; k < KEPT; k++)
        if (tid + k * threads < vecs)
            squares += squares_of(v[k]);
    float r = rstd_of(block_sum(squares, room, threads), cols, eps);
#pragma unroll
    for (int k = 0; k < KEPT; k++)
        if (tid + k * threads < vecs) {
            int c = (tid + k * threads) * V;
            put_norm(y + c, v[k], load_piece<V>(w + c), r);
        }
    return r;
}

template <class T, int V>
INLINE float norm_again(const T *x, const T *w, T *y, int cols, float eps, float *room)
{
    float squares = 0;
    for (int64_t c = (int64_t)threadIdx.x * V; c < cols; c += (int64_t)blockDim.x * V)
        squares += squares_of(load_piece<V>(x + c));
    float r = rstd_of(block_sum(squares, room, (int)blockDim.x), cols, eps);
    for (int64_t c = (int64_t)threadIdx.x * V; c < cols; c += (int64_t)blockDim.x * V)
        put_norm(y + c, load_piece<V>(x + c), load_piece<V>(w + c), r);
    return r;
}

template <class T> INLINE void norm_fwd(const slide_rmsnorm_fwd_args &a)
{
    __shared__ float room[WARP];
    constexpr int V = vec<T>::size;
    unsigned t = blockIdx.x / (unsigned)a.groups, g = blockIdx.x % (unsigned)a.groups;
    const T *x = (const T *)a.x + t * a.x_stride + (int64_t)g * a.cols, *w = (const T *)a.w;
    T *y = (T *)a.y + t * a.y_stride + (int64_t)g * a.cols;
    float r;
    if (!whole_fwd<T>(a))
        r = norm_again<T, 1>(x, w, y, a.cols, a.eps, room);
    else if (a.cols / V <= KEPT * (int)blockDim.x)
        r = norm_kept(x, w, y, a.cols, a.eps, room);
    else
        r = norm_again<T, V>(x, w, y, a.cols, a.eps, room);
    if (threadIdx.x == 0)
        a.rstd[blockIdx.x] = r;
}

/* The i-th short row of this lane's team; false: there is none, and *at is a place that can be
 * read. */
INLINE bool row_of(unsigned i, unsigned rows, int groups, int cols, int64_t stride, int64_t *at)
{
    unsigned row = i < rows ? i : 0;
    *at = row / (unsigned)groups * stride + (int64_t)(row % (unsigned)groups) * cols;
    return i < rows;
}

template <class T, int V> INLINE void norm_fwd_short(const slide_rmsnorm_fwd_args &a)
{
    int lanes = team_lanes<T>(a.cols), lane = (int)threadIdx.x % lanes;
    unsigned teams = blockDim.x / (unsigned)lanes, rows = (unsigned)(a.n * a.groups);
    unsigned first = blockIdx.x * teams * ROWS + threadIdx.x / (unsigned)lanes;
    const T *x = (const T *)a.x, *w = (const T *)a.w;
    T *y = (T *)a.y;
    piece<T, V> v[ROWS];
    float squares[ROWS];
    int64_t at;
    /* With V = 1 a lane has several elements, and reads them again. */
#pragma unroll
    for (int k = 0; k < ROWS; k++)
        if (row_of(first + k * teams, rows, a.groups, a.cols, a.x_stride, &at) && lane * V < a.cols)
            v[k] = load_piece<V>(x + at + lane * V);
#pragma unroll
    for (int k = 0; k < ROWS; k++) {
        bool mine = row_of(first + k * teams, rows, a.groups, a.cols, a.x_stride, &at);
        squares[k] = mine && lane * V < a.cols ? squares_of(v[k]) : 0;
        if (V == 1 && mine)
            for (int c = lane + lanes; c < a.cols; c += lanes)
                squares[k] += squares_of(load_piece<V>(x + at + c));
    }
#pragma unroll
    for (int k = 0; k < ROWS; k++) {
        unsigned i = first + k * teams;
        float r = rstd_of(team_sum(squares[k], lanes), a.cols, a.eps);
        if (!row_of(i, rows, a.groups, a.cols, a.y_stride, &at))
            continue;
        if (lane == 0)
            a.rstd[i] = r;
        if (lane * V < a.cols)
            put_norm(y + at + lane * V, v[k], load_piece<V>(w + lane * V), r);
        if (V == 1) {
            int64_t from;
            row_of(i, rows, a.groups, a.cols, a.x_stride, &from);
            for (int c = lane + lanes; c < a.cols; c += lanes)
                put_norm(y + at + c, load_piece<V>(x + from + c), load_piece<V>(w + c), r);
        }
    }
}

template <class T> INLINE void norm_fwd_short_any(const slide_rmsnorm_fwd_args &a)
{
    if (whole_fwd<T>(a))
        norm_fwd_short<T, vec<T>::size>(a);
    else
        norm_fwd_short<T, 1>(a);
}

ENTRY __launch_bounds__(1024) slide_k_rmsnorm_fwd_f32(slide_rmsnorm_fwd_args a)
{
    norm_fwd<float>(a);
}

ENTRY __launch_bounds__(1024) slide_k_rmsnorm_fwd_bf16(slide_rmsnorm_fwd_args a)
{
    norm_fwd<bf16>(a);
}

ENTRY __launch_bounds__(256) slide_k_rmsnorm_fwd_short_f32(slide_rmsnorm_fwd_args a)
{
    norm_fwd_short_any<float>(a);
}

ENTRY __launch_bounds__(256) slide_k_rmsnorm_fwd_short_bf16(slide_rmsnorm_fwd_args a)
{
    norm_fwd_short_any<bf16>(a);
}

/* ---- backward ---- */

/* Adds dy * w * xhat over the columns, and dy * act(xhat) to dw's. */
template <class T, int V>
INLINE float dot_of(const piece<T, V> &dy, const piece<T, V> &x, const piece<T, V> &w, float r,
                    float (&dw)[V])
{
    float dot = 0;
#pragma unroll
    for (int k = 0; k < V; k++) {
        float d = get(dy, k), hat = get(x, k) * r;
        dot += d * get(w, k) * hat;
        dw[k] += d * round_to<T>(hat);
    }
    return dot;
}

template <class T, int V>
INLINE void put_dx(T *dx, const piece<T, V> &dy, const piece<T, V> &x, const piece<T, V> &w,
                   const piece<T, V> &old, int add, float r, float mean)
{
    float out[V];
#pragma unroll
    for (int k = 0; k < V; k++) {
        float hat = get(x, k) * r;
        out[k] = r * (get(dy, k) * get(w, k) - hat * mean);
        if (add)
            out[k] += get(old, k);
    }
    store_f32s(dx, out);
}

/* The vectors of a block: `rows` of them, the first is number `first` of all. */
struct span {
    unsigned first, rows;
};

INLINE span span_of(const slide_rmsnorm_bwd_args &a)
{
    int64_t from = (int64_t)blockIdx.x * SLIDE_NORM_BLOCK;
    int64_t tokens = min((int64_t)SLIDE_NORM_BLOCK, a.n - from);
    return span{(unsigned)(from * a.groups), (unsigned)(tokens * a.groups)};
}

/* Sums of U numbers over the block; `room` alternates between two, so that one barrier will do. */
template <int U> INLINE void block_sums(float (&x)[U], float (*room)[U])
{
    int warps = (int)blockDim.x / WARP;
#pragma unroll
    for (int u = 0; u < U; u++) {
        x[u] = warp_sum(x[u]);
        if (threadIdx.x % WARP == 0)
            room[threadIdx.x / WARP][u] = x[u];
        x[u] = 0;
    }
    __syncthreads();
    for (int w = 0; w < warps; w++)
#pragma unroll
        for (int u = 0; u < U; u++)
            x[u] += room[w][u];
}

/* Rows that a thread holds KEEP vectors of; U rows in flight. */
template <class T, int KEEP, int U>
INLINE void norm_bwd_kept(const slide_rmsnorm_bwd_args &a, float (*room)[WARP][2])
{
    constexpr int V = vec<T>::size;
    span s = span_of(a);
    int vecs = a.cols / V, threads = (int)blockDim.x, tid = (int)threadIdx.x;
    float dw[KEEP][V] = {};
    const T *w = (const T *)a.w;
    for (unsigned row = 0; row < s.rows; row += U) {
        piece<T, V> x[U][KEEP], dy[U][KEEP], old[U][KEEP];
        float r[U], dot[2] = {};
        int64_t at;
#pragma unroll
        for (int u = 0; u < U; u++) {
            unsigned i = s.first + row + u;
            bool have = row + u < s.rows;
            r[u] = have ? a.rstd[i] : 0;
#pragma unroll
            for (int k = 0; k < KEEP; k++)
                if (have && tid + k * threads < vecs) {
                    int c = (tid + k * threads) * V;
                    row_of(i, ~0u, a.groups, a.cols, a.x_stride, &at);
                    x[u][k] = load_piece<V>((const T *)a.x + at + c);
                    row_of(i, ~0u, a.groups, a.cols, a.dy_stride, &at);
                    dy[u][k] = load_piece<V>((const T *)a.dy + at + c);
                    row_of(i, ~0u, a.groups, a.cols, a.dx_stride, &at);
                    if (a.add)
                        old[u][k] = load_piece<V>((const T *)a.dx + at + c);
                }
        }
#pragma unroll
        for (int u = 0; u < U; u++)
#pragma unroll
            for (int k = 0; k < KEEP; k++)
                if (row + u < s.rows && tid + k * threads < vecs)
                    dot[u] += dot_of(dy[u][k], x[u][k], load_piece<V>(w + (tid + k * threads) * V),
                                     r[u], dw[k]);
        block_sums(dot, room[row / U % 2]);
#pragma unroll
        for (int u = 0; u < U; u++)
#pragma unroll
            for (int k = 0; k < KEEP; k++)
                if (row + u < s.rows && tid + k * threads < vecs) {
                    row_of(s.first + row + u, ~0u, a.groups, a.cols, a.dx_stride, &at);
                    int c = (tid + k * threads) * V;
                    put_dx((T *)a.dx + at + c, dy[u][k], x[u][k], load_piece<V>(w + c), old[u][k],
                           a.add, r[u], dot[u] / (float)a.cols);
                }
    }
    float *out = a.scratch + (int64_t)blockIdx.x * a.cols;
#pragma unroll
    for (int k = 0; k < KEEP; k++)
        if (tid + k * threads < vecs)
            store_f32s(out + (tid + k * threads) * V, dw[k]);
}

/* Rows that are read twice; the sums of dw stand in scratch, each column with its thread. */
template <class T, int V>
INLINE void norm_bwd_again(const slide_rmsnorm_bwd_args &a, float (*room)[WARP][2])
{
    span s = span_of(a);
    float *sums = a.scratch + (int64_t)blockIdx.x * a.cols;
    const T *w = (const T *)a.w;
    int64_t begin = (int64_t)threadIdx.x * V, step = (int64_t)blockDim.x * V, at;
    for (unsigned row = 0; row < s.rows; row++) {
        float r = a.rstd[s.first + row], dot[2] = {};
        row_of(s.first + row, ~0u, a.groups, a.cols, a.x_stride, &at);
        const T *x = (const T *)a.x + at;
        row_of(s.first + row, ~0u, a.groups, a.cols, a.dy_stride, &at);
        const T *dy = (const T *)a.dy + at;
        row_of(s.first + row, ~0u, a.groups, a.cols, a.dx_stride, &at);
        T *dx = (T *)a.dx + at;
        for (int64_t c = begin; c < a.cols; c += step) {
            float dw[V] = {};
            if (row)
                load_f32s(sums + c, dw);
            dot[0] +=
                dot_of(load_piece<V>(dy + c), load_piece<V>(x + c), load_piece<V>(w + c), r, dw);
            store_f32s(sums + c, dw);
        }
        block_sums(dot, room[row % 2]);
        float mean = dot[0] / (float)a.cols;
        for (int64_t c = begin; c < a.cols; c += step)
            put_dx(dx + c, load_piece<V>(dy + c), load_piece<V>(x + c), load_piece<V>(w + c),
                   load_piece<V>((const T *)dx + c), a.add, r, mean);
    }
}

/* A team a row; a lane has the same columns in all of them. */
template <class T> INLINE void norm_bwd_teams(const slide_rmsnorm_bwd_args &a, float *part)
{
    constexpr int V = vec<T>::size;
    span s = span_of(a);
    int lanes = team_lanes<T>(a.cols), lane = (int)threadIdx.x % lanes;
    unsigned teams = THREADS_SHORT / (unsigned)lanes, team = threadIdx.x / (unsigned)lanes;
    bool inside = lane * V < a.cols;
    float dw[V] = {};
    piece<T, V> w = {};
    if (inside)
        w = load_piece<V>((const T *)a.w + lane * V);
    for (unsigned row = 0; row < s.rows; row += teams * ROWS_BWD) {
        piece<T, V> x[ROWS_BWD], dy[ROWS_BWD], old[ROWS_BWD];
        float r[ROWS_BWD], dot[ROWS_BWD];
        int64_t at;
#pragma unroll
        for (int u = 0; u < ROWS_BWD; u++) {
            unsigned i = row + u * teams + team;
            r[u] = 0;
            if (i < s.rows && inside) {
                r[u] = a.rstd[s.first + i];
                row_of(s.first + i, ~0u, a.groups, a.cols, a.x_stride, &at);
                x[u] = load_piece<V>((const T *)a.x + at + lane * V);
                row_of(s.first + i, ~0u, a.groups, a.cols, a.dy_stride, &at);
                dy[u] = load_piece<V>((const T *)a.dy + at + lane * V);
                row_of(s.first + i, ~0u, a.groups, a.cols, a.dx_stride, &at);
                if (a.add)
                    old[u] = load_piece<V>((const T *)a.dx + at + lane * V);
            }
        }
#pragma unroll
        for (int u = 0; u < ROWS_BWD; u++) {
            dot[u] = 0;
            if (row + u * teams + team < s.rows && inside)
                dot[u] = dot_of(dy[u], x[u], w, r[u], dw);
            dot[u] = team_sum(dot[u], lanes);
        }
#pragma unroll
        for (int u = 0; u < ROWS_BWD; u++) {
            unsigned i = row + u * teams + team;
            if (i < s.rows && inside) {
                row_of(s.first + i, ~0u, a.groups, a.cols, a.dx_stride, &at);
                put_dx((T *)a.dx + at + lane * V, dy[u], x[u], w, old[u], a.add, r[u],
                       dot[u] / (float)a.cols);
            }
        }
    }
    store_f32s(part + threadIdx.x * V, dw); /* [teams, lanes * V] */
    __syncthreads();
    for (int c = (int)threadIdx.x; c < a.cols; c += THREADS_SHORT) {
        float sum = 0;
        for (unsigned k = 0; k < teams; k++)
            sum += part[k * (unsigned)(lanes * V) + (unsigned)c];
        a.scratch[(int64_t)blockIdx.x * a.cols + c] = sum;
    }
}

/* One entry for each way to hold a row, so that none pays registers for another's. cuda_launch.c
 * looks at the alignment; slide_k_rmsnorm_bwd_again takes every shape. */
#define ENTRIES(act, T)                                                                            \
    ENTRY __launch_bounds__(THREADS_SHORT, 2)                                                      \
        slide_k_rmsnorm_bwd_short_##act(slide_rmsnorm_bwd_args a)                                  \
    {                                                                                              \
        alignas(16) __shared__ float part[THREADS_SHORT * vec<T>::size];                           \
        norm_bwd_teams<T>(a, part);                                                                \
    }                                                                                              \
    ENTRY __launch_bounds__(512, 2) slide_k_rmsnorm_bwd_##act(slide_rmsnorm_bwd_args a)            \
    {                                                                                              \
        __shared__ float room[2][WARP][2];                                                         \
        norm_bwd_kept<T, 1, 2>(a, room);                                                           \
    }                                                                                              \
    ENTRY __launch_bounds__(1024, 1) slide_k_rmsnorm_bwd_wide_##act(slide_rmsnorm_bwd_args a)      \
    {                                                                                              \
        __shared__ float room[2][WARP][2];                                                         \
        norm_bwd_kept<T, 2, 1>(a, room);                                                           \
    }                                                                                              \
    ENTRY __launch_bounds__(512) slide_k_rmsnorm_bwd_again_##act(slide_rmsnorm_bwd_args a)         \
    {                                                                                              \
        __shared__ float room[2][WARP][2];                                                         \
        norm_bwd_again<T, 1>(a, room);                                                             \
    }

ENTRIES(f32, float)
ENTRIES(bf16, bf16)
