/* The small kernels of the CPU backend against formulas in float64, in FP32 and BF16, at sizes
 * around the vectors; the same bits from each instruction set and number of threads. */
#include "cpu/cpu_isa.h"
#include "cpu_rig.h"

static const int32_t col_sizes[] = {1, 7, 16, 17, 64, 65, 130};
static const int32_t row_sizes[] = {1, 3, 65, 130};
#define COUNT(array) (sizeof(array) / sizeof((array)[0]))

/* What a test runs for every type, number of columns and number of rows. */
#define EACH_SIZE(act, cols, n)                                                                    \
    for (size_t a_ = 0; a_ < COUNT(rig_acts); a_++)                                                \
        for (size_t c_ = 0; c_ < COUNT(col_sizes); c_++)                                           \
            for (size_t n_ = 0; n_ < COUNT(row_sizes); n_++, rig_drop(r))                          \
                for (int once_ = 1; once_;)                                                        \
                    for (enum slide_dtype act = rig_acts[a_]; once_;)                              \
                        for (int32_t cols = col_sizes[c_], n = row_sizes[n_]; once_; once_ = 0)

#define EXPS 4096

/* Attention's backward makes exp(scale s - lse) of every score: the plain exponential. */
static void exps(enum slide_isa isa, float *x, int64_t n)
{
    float *dp = calloc((size_t)n, sizeof *dp);
    slide_cpu_loops_get(isa)->softmax_bwd(x, dp, 0, n, n, 1, 0, 0);
    free(dp);
}

static void exponential_one(struct rig *r)
{
    double worst = 0;
    for (int i = 0; i < 100; i++, rig_drop(r)) {
        float *x = rig_array(r, SLIDE_F32, EXPS, 88.02), *y = rig_new(r, EXPS * sizeof *y);
        for (int l = 0; l < EXPS; l++)
            y[l] = x[l] = x[l] + 0.7f;
        exps(r->device->isa, y, EXPS);
        rig_same(r, y, EXPS * sizeof *y);
        for (int l = 0; l < EXPS && r->first; l++) {
            double want = exp((double)x[l]);
            double wrong = fabs(y[l] - want) / ldexp(1, ilogb(want) - 23);
            worst = wrong > worst || wrong != wrong ? wrong : worst;
        }
    }
    char text[64];
    snprintf(text, sizeof text, "exp within 2 units in the last place: %.3f", worst);
    test_check(worst <= 2, __FILE__, __LINE__, text);
    float y[] = {0,    -0.0f, INFINITY, -INFINITY, NAN,    89,    1e30f, -1e30f,
                 -104, 88.7f, 1,        -87.34f,   88.73f, 1e-8f, -1e-8f};
    exps(r->device->isa, y, COUNT(y));
    CHECK(y[0] == 1 && y[1] == 1 && y[2] == INFINITY && y[3] == 0 && y[4] != y[4]);
    CHECK(y[5] == INFINITY && y[6] == INFINITY && y[7] == 0 && y[8] == 0 && y[9] < INFINITY);
    CHECK(fabs(y[10] - exp(1)) < 3e-7 && y[11] == 0 && y[12] == INFINITY);
    CHECK(y[13] == 1 && y[14] == 1);
}

static void exponential(void)
{
    every(exponential_one);
}

static void cast_one(struct rig *r)
{
    static const int64_t sizes[] = {1, 15, 16, 17, 65, 65537, 131073};
    static const uint32_t special[] = {0x7f800000, 0xff800000, 0x7fc00000, 0x7f800001, 0xffffffff,
                                       0x3f808000, 0x3f818000, 0x7f7fffff, 0x00000001, 0x80000000};
    for (size_t s = 0; s < COUNT(sizes); s++, rig_drop(r)) {
        int64_t n = sizes[s];
        float *in = rig_array(r, SLIDE_F32, n, 1e3);
        for (size_t i = 0; i < COUNT(special) && (int64_t)i < n; i++)
            in[i] = slide_f32_from_bits(special[i]);
        uint16_t *half = rig_new(r, (size_t)n * 2);
        float *back = rig_new(r, (size_t)n * 4), *same = rig_new(r, (size_t)n * 4);
        struct slide_cast_args down = {in, half, n, SLIDE_F32, SLIDE_BF16};
        struct slide_cast_args up = {half, back, n, SLIDE_BF16, SLIDE_F32};
        struct slide_cast_args copy = {in, same, n, SLIDE_F32, SLIDE_F32};
        rig_done(r, slide_launch_cast(r->lane, SLIDE_F32, &down, &r->err) ||
                        slide_launch_cast(r->lane, SLIDE_BF16, &up, &r->err) ||
                        slide_launch_cast(r->lane, SLIDE_F32, &copy, &r->err));
        int64_t wrong = memcmp(same, in, (size_t)n * 4) != 0;
        for (int64_t i = 0; i < n; i++)
            wrong += half[i] != slide_f32_to_bf16(in[i]) ||
                     slide_f32_bits(back[i]) != (uint32_t)half[i] << 16;
        CHECK_EQ(wrong, 0);
    }
}

static void cast(void)
{
    every(cast_one);
}

/* x * rstd as the kernels have it, to the bit: BF16 rounds before the gain. */
static float norm_unit(enum slide_dtype act, const void *x, int64_t at, float rstd)
{
    float unit = (float)rig_get(act, x, at) * rstd;
    return act == SLIDE_F32 ? unit : slide_bf16_to_f32(slide_f32_to_bf16(unit));
}

static void norm_one(struct rig *r)
{
    EACH_SIZE(act, cols, n)
    {
        int32_t groups = cols == 17 ? 3 : 1, width = groups * cols;
        int64_t stride = width + (cols == 7 ? 5 : 0);
        size_t bytes = (size_t)(n * stride) * slide_dtype_size(act);
        bool add = n == 65;
        float eps = 1e-5f;
        void *x = rig_array(r, act, n * stride, 2), *w = rig_array(r, act, cols, 2);
        void *dy = rig_array(r, act, n * stride, 1), *y = rig_copy(r, x, bytes);
        void *before = rig_array(r, act, n * stride, 1), *dx = rig_copy(r, before, bytes);
        float *rstd = rig_new(r, (size_t)(n * groups) * 4);
        float *dw = rig_array(r, SLIDE_F32, cols, 1), *dw0 = rig_copy(r, dw, (size_t)cols * 4);
        int64_t blocks = (n + SLIDE_NORM_BLOCK - 1) / SLIDE_NORM_BLOCK;
        float *scratch = rig_new(r, (size_t)(blocks * cols) * 4);
        struct slide_rmsnorm_fwd_args fwd = {y, w, y, rstd, n, stride, stride, groups, cols, eps};
        struct slide_rmsnorm_bwd_args bwd = {dy, x,      w,      rstd,   dx,     dw,   scratch,
                                             n,  stride, stride, stride, groups, cols, add};
        if (n == 3) { /* dx may be dy */
            memcpy(dx, dy, bytes);
            bwd.dy = dx;
        }
        rig_done(r, slide_launch_rmsnorm_fwd(r->lane, act, &fwd, &r->err) || /* in place */
                        slide_launch_rmsnorm_bwd(r->lane, act, &bwd, &r->err));
        rig_same(r, y, bytes);
        rig_same(r, dx, bytes);
        rig_same(r, dw, (size_t)cols * 4);
        if (!r->first)
            continue;
        double *gain = calloc((size_t)cols * 2, sizeof *gain), *size = gain + cols;
        struct rig_worst wy = {0}, wr = {0}, wx = {0}, ww = {0};
        int64_t misrounded = 0;
        for (int64_t v = 0; v < (int64_t)n * groups; v++) {
            int64_t at = v / groups * stride + v % groups * cols;
            double squares = 0, dots = 0, sizes = 0;
            for (int c = 0; c < cols; c++)
                squares += rig_get(act, x, at + c) * rig_get(act, x, at + c);
            double rr = 1 / sqrt(squares / cols + (double)eps);
            rig_compare(&wr, SLIDE_F32, v, rstd[v], rr, 0);
            for (int c = 0; c < cols; c++) {
                double g = rig_get(act, dy, at + c) * rig_get(act, w, c);
                double hat = rig_get(act, x, at + c) * rr;
                dots += g * hat;
                sizes += fabs(g * hat);
                gain[c] += rig_get(act, dy, at + c) * (double)norm_unit(act, x, at + c, rstd[v]);
                size[c] += fabs(rig_get(act, dy, at + c) * hat);
            }
            for (int c = 0; c < cols; c++) {
                double g = rig_get(act, dy, at + c) * rig_get(act, w, c);
                double hat = rig_get(act, x, at + c) * rr, old = 0;
                if (add)
                    old = rig_get(act, before, at + c);
                double want = rr * (g - hat * dots / cols) + old;
                double scale = rr * (fabs(g) + fabs(hat) * sizes / cols) + fabs(old);
                rig_compare(&wy, act, at + c, rig_get(act, y, at + c), hat * rig_get(act, w, c), 0);
                float out;
                rig_put(act, &out, 0,
                        norm_unit(act, x, at + c, rstd[v]) * (float)rig_get(act, w, c));
                misrounded += rig_get(act, &out, 0) != rig_get(act, y, at + c);
                /* FP32 inside, whatever act: the scale counts with FP32's tolerance. */
                rig_compare(&wx, act, at + c, rig_get(act, dx, at + c), want,
                            scale * rig_tolerance[SLIDE_F32] / rig_tolerance[act]);
            }
        }
        for (int c = 0; c < cols; c++)
            rig_compare(&ww, SLIDE_F32, c, dw[c], dw0[c] + gain[c], size[c]);
        CHECK_EQ(misrounded, 0);
        RIG_JUDGE(&wr, "rstd of %d x %d", n, cols);
        RIG_JUDGE(&wy, "rmsnorm of %d x %d, type %d", n, cols, act);
        RIG_JUDGE(&wx, "rmsnorm dx of %d x %d, type %d", n, cols, act);
        RIG_JUDGE(&ww, "rmsnorm dw of %d x %d, type %d", n, cols, act);
        free(gain);
    }
}

static void norm(void)
{
    every(norm_one);
}

static void rope_one(struct rig *r)
{
    EACH_SIZE(act, half, n)
    {
        int32_t heads = 3, d = half == 7 ? 20 : 2 * half; /* 20: six elements pass */
        int64_t stride = heads * d + (half == 16 ? 9 : 0);
        size_t size = slide_dtype_size(act), bytes = (size_t)(n * stride) * size;
        int32_t *positions = rig_new(r, (size_t)n * 4);
        for (int i = 0; i < n; i++)
            positions[i] = rig_below(r, 131072);
        float *freq = rig_new(r, (size_t)half * 4);
        for (int c = 0; c < half; c++)
            freq[c] = (float)pow(10000, -(double)c / half);
        float *cosine = rig_new(r, (size_t)(n * half) * 4),
              *sine = rig_new(r, (size_t)(n * half) * 4);
        void *x = rig_array(r, act, n * stride, 3), *y = rig_copy(r, x, bytes);
        float factor = n == 3 ? 1.25f : 1;
        struct slide_rope_table_args table = {positions, freq, cosine, sine, n, half, factor};
        struct slide_rope_args turn = {y, cosine, sine, n, stride, heads, d, half, 1};
        rig_done(r, slide_launch_rope_table(r->lane, act, &table, &r->err) ||
                        slide_launch_rope(r->lane, act, &turn, &r->err));
        rig_same(r, cosine, (size_t)(n * half) * 4);
        rig_same(r, sine, (size_t)(n * half) * 4);
        rig_same(r, y, bytes);
        void *back = rig_copy(r, y, bytes);
        turn.x = back;
        turn.sign = -1;
        rig_done(r, slide_launch_rope(r->lane, act, &turn, &r->err));
        rig_same(r, back, bytes);
        if (!r->first)
            continue;
        struct rig_worst wt = {0}, wy = {0}, wb = {0};
        int64_t passed = 0;
        for (int64_t t = 0; t < n; t++) {
            for (int c = 0; c < half; c++) {
                double angle = (double)((float)positions[t] * freq[c]);
                rig_compare(&wt, act, t * half + c, cosine[t * half + c], factor * cos(angle), 0.1);
                rig_compare(&wt, act, t * half + c, sine[t * half + c], factor * sin(angle), 0.1);
            }
            for (int64_t i = 0; i < stride; i++) {
                int64_t h = i / d, c = i % d, at = t * stride + i;
                double own = rig_get(act, x, at);
                if (h >= heads || c >= 2 * half) {
                    passed += rig_get(act, y, at) != own || rig_get(act, back, at) != own;
                    continue;
                }
                double cc = cosine[t * half + c % half], ss = sine[t * half + c % half];
                double other = rig_get(act, x, c < half ? at + half : at - half);
                double want = own * cc + (c < half ? -other : other) * ss;
                double terms = 0.1 * (fabs(own) + fabs(other)); /* they may cancel */
                rig_compare(&wy, act, at, rig_get(act, y, at), want, terms);
                rig_compare(&wb, act, at, rig_get(act, back, at), own * (cc * cc + ss * ss), 3);
            }
        }
        CHECK_EQ(passed, 0);
        RIG_JUDGE(&wt, "rope table of %d x %d, type %d", n, half, act);
        RIG_JUDGE(&wy, "rope of %d x %d, type %d", n, half, act);
        RIG_JUDGE(&wb, "rope back of %d x %d, type %d", n, half, act);
    }
}

static void rope(void)
{
    every(rope_one);
}

static void swiglu_one(struct rig *r)
{
    static const float edge[] = {0, -0.0f, 100, -100, -87, -80, 88, 1e-20f, -1e-20f, 30};
    EACH_SIZE(act, cols, n)
    {
        size_t size = slide_dtype_size(act);
        void *gu = rig_array(r, act, (int64_t)n * 2 * cols, 8);
        void *dout = rig_array(r, act, (int64_t)n * cols, 2);
        for (int c = 0; c < (int)COUNT(edge) && c < cols; c++)
            rig_put(act, gu, c, edge[c]);
        void *out = rig_new(r, (size_t)(n * cols) * size);
        void *dgu = rig_copy(r, gu, (size_t)(n * 2 * cols) * size);
        struct slide_swiglu_fwd_args fwd = {gu, out, n, cols};
        struct slide_swiglu_bwd_args bwd = {dgu, dout, dgu, n, cols}; /* in place */
        rig_done(r, slide_launch_swiglu_fwd(r->lane, act, &fwd, &r->err) ||
                        slide_launch_swiglu_bwd(r->lane, act, &bwd, &r->err));
        rig_same(r, out, (size_t)(n * cols) * size);
        rig_same(r, dgu, (size_t)(n * 2 * cols) * size);
        if (!r->first)
            continue;
        struct rig_worst wo = {0}, wg = {0}, wu = {0};
        int64_t misrounded = 0;
        for (int64_t t = 0; t < n; t++) {
            for (int64_t c = 0; c < cols; c++) {
                double g = rig_get(act, gu, t * 2 * cols + c);
                double u = rig_get(act, gu, t * 2 * cols + cols + c);
                double d = rig_get(act, dout, t * cols + c), s = 1 / (1 + exp(-g));
                uint16_t half = slide_f32_to_bf16((float)(g * s));
                misrounded +=
                    act == SLIDE_BF16 && ((uint16_t *)out)[t * cols + c] !=
                                             slide_f32_to_bf16(slide_bf16_to_f32(half) * (float)u);
                double slope = s * (1 + g * (1 - s));
                rig_compare(&wo, act, t * cols + c, rig_get(act, out, t * cols + c), g * s * u, 0);
                rig_compare(&wg, act, t * cols + c, rig_get(act, dgu, t * 2 * cols + c),
                            d * u * slope, act == SLIDE_F32 ? fabs(d * u) : 0.02);
                rig_compare(&wu, act, t * cols + c, rig_get(act, dgu, t * 2 * cols + cols + c),
                            d * g * s, 0);
            }
        }
        /* BF16 rounds silu before the product too; exp is off by a bit where a tie is near. */
        CHECK(misrounded <= n * cols / 1000 + 1);
        RIG_JUDGE(&wo, "swiglu of %d x %d, type %d", n, cols, act);
        RIG_JUDGE(&wg, "swiglu d gate of %d x %d, type %d", n, cols, act);
        RIG_JUDGE(&wu, "swiglu d up of %d x %d, type %d", n, cols, act);
    }
}

static void swiglu(void)
{
    every(swiglu_one);
}

static void bias_one(struct rig *r)
{
    EACH_SIZE(act, cols, n)
    {
        int64_t stride = cols + (cols == 65 ? 3 : 0);
        void *dy = rig_array(r, act, n * stride, 1);
        float *db = rig_array(r, SLIDE_F32, cols, 1), *db0 = rig_copy(r, db, (size_t)cols * 4);
        int64_t blocks = (n + SLIDE_BIAS_BLOCK - 1) / SLIDE_BIAS_BLOCK;
        float *scratch = rig_new(r, (size_t)(blocks * cols) * 4);
        struct slide_bias_bwd_args args = {dy, db, scratch, n, stride, cols};
        rig_done(r, slide_launch_bias_bwd(r->lane, act, &args, &r->err));
        rig_same(r, db, (size_t)cols * 4);
        if (!r->first)
            continue;
        struct rig_worst w = {0};
        for (int c = 0; c < cols; c++) {
            double sum = db0[c], size = 1;
            for (int64_t t = 0; t < n; t++) {
                sum += rig_get(act, dy, t * stride + c);
                size += fabs(rig_get(act, dy, t * stride + c));
            }
            rig_compare(&w, SLIDE_F32, c, db[c], sum, size);
        }
        RIG_JUDGE(&w, "bias gradient of %d x %d, type %d", n, cols, act);
    }
}

static void bias(void)
{
    every(bias_one);
}

static void embed_one(struct rig *r)
{
    EACH_SIZE(act, cols, n)
    {
        int32_t vocab = 11, skip = n == 65 ? 4 : -1;
        size_t size = slide_dtype_size(act), row = (size_t)cols * size;
        void *table = rig_array(r, act, vocab * cols, 1), *out = rig_new(r, (size_t)n * row);
        void *dout = rig_array(r, act, n * cols, 1);
        float *grad = rig_array(r, SLIDE_F32, vocab * cols, 1);
        float *want = rig_copy(r, grad, (size_t)(vocab * cols) * 4);
        int32_t *ids = rig_new(r, (size_t)n * 4);
        for (int i = 0; i < n; i++)
            ids[i] = rig_below(r, vocab);
        struct slide_embed_fwd_args fwd = {ids, table, out, n, cols};
        struct slide_embed_bwd_args bwd = {ids, dout, grad, n, cols, vocab, skip};
        rig_done(r, slide_launch_embed_fwd(r->lane, act, &fwd, &r->err) ||
                        slide_launch_embed_bwd(r->lane, act, &bwd, &r->err));
        int64_t wrong = 0;
        for (int i = 0; i < n; i++) {
            wrong += memcmp((char *)out + (size_t)i * row, (char *)table + (size_t)ids[i] * row,
                            row) != 0;
            for (int c = 0; c < cols && ids[i] != skip; c++)
                want[ids[i] * cols + c] += (float)rig_get(act, dout, i * cols + c);
        }
        CHECK_EQ(wrong, 0);
        CHECK(!memcmp(grad, want, (size_t)(vocab * cols) * 4)); /* token order: the same bits */
    }
}

static void embed(void)
{
    every(embed_one);
}

/* Loss and gradient of every row; `spread` is the logits' size. */
static void ce_rows(struct rig *r, enum slide_dtype act, int32_t n, int32_t vocab, double spread)
{
    size_t bytes = (size_t)n * (size_t)vocab * slide_dtype_size(act);
    void *z = rig_array(r, act, (int64_t)n * vocab, spread), *dz = rig_copy(r, z, bytes);
    void *kept = rig_copy(r, z, bytes);
    int32_t *labels = rig_new(r, (size_t)n * 4);
    float *loss = rig_new(r, (size_t)n * 4), *again = rig_new(r, (size_t)n * 4);
    float scale = 1.0f / 37;
    for (int i = 0; i < n; i++)
        labels[i] = i % 5 == 2 ? -100 : rig_below(r, vocab);
    struct slide_ce_args args = {dz, labels, loss, n, vocab, 1, scale};
    struct slide_ce_args only = {kept, labels, again, n, vocab, 0, scale};
    rig_done(r, slide_launch_ce(r->lane, act, &args, &r->err) ||
                    slide_launch_ce(r->lane, act, &only, &r->err));
    CHECK(!memcmp(loss, again, (size_t)n * 4) && !memcmp(kept, z, bytes));
    rig_same(r, loss, (size_t)n * 4);
    rig_same(r, dz, bytes);
    if (!r->first)
        return;
    struct rig_worst wl = {0}, wz = {0};
    for (int64_t t = 0; t < n; t++) {
        double most = -INFINITY, sum = 0;
        for (int64_t c = 0; c < vocab; c++)
            most = fmax(most, rig_get(act, z, t * vocab + c));
        for (int64_t c = 0; c < vocab; c++)
            sum += exp(rig_get(act, z, t * vocab + c) - most);
        bool none = labels[t] < 0;
        double want = none ? 0 : most + log(sum) - rig_get(act, z, t * vocab + labels[t]);
        rig_compare(&wl, SLIDE_F32, t, loss[t], want, none ? 0 : 0.1 * fabs(most) + 0.1);
        for (int64_t c = 0; c < vocab; c++) {
            double p = exp(rig_get(act, z, t * vocab + c) - most) / sum;
            double g = none ? 0 : (p - (c == labels[t])) * (double)scale;
            rig_compare(&wz, act, t * vocab + c, rig_get(act, dz, t * vocab + c), g,
                        c == labels[t] ? scale * (act == SLIDE_F32 ? 1 : 0.01) : 0);
        }
    }
    RIG_JUDGE(&wl, "loss of %d x %d, type %d", n, vocab, act);
    RIG_JUDGE(&wz, "loss gradient of %d x %d, type %d", n, vocab, act);
}

static void ce_one(struct rig *r)
{
    EACH_SIZE(act, vocab, n)
    ce_rows(r, act, n, vocab, n == 3 ? 80 : 6);
    for (int a = 0; a < 2; a++, rig_drop(r))
        ce_rows(r, rig_acts[a], 2, 151936, 12);
    for (int a = 0; a < 2;
         a++, rig_drop(r)) { /* NaN and +Inf aren't lost, -Inf is a masked logit */
        enum slide_dtype act = rig_acts[a];
        int32_t labels[4] = {0, 0, 0, 1}, cols = 37;
        float loss[4];
        void *z = rig_array(r, act, 4 * cols, 1);
        rig_put(act, z, 20, NAN);
        rig_put(act, z, cols + 20, INFINITY);
        for (int c = 2; c < cols; c++)
            rig_put(act, z, 2 * cols + c, -INFINITY);
        for (int c = 0; c < cols; c++)
            rig_put(act, z, 3 * cols + c, c == 1 ? 1e4 : -1e4);
        rig_put(act, z, 2 * cols, 3);
        rig_put(act, z, 2 * cols + 1, 3);
        struct slide_ce_args args = {z, labels, loss, 4, cols, 1, 1};
        rig_done(r, slide_launch_ce(r->lane, act, &args, &r->err));
        CHECK(loss[0] != loss[0] && loss[1] != loss[1]);
        CHECK(fabs(loss[2] - log(2)) < 1e-6 && loss[3] == 0);
        CHECK(rig_get(act, z, 2 * cols) == -0.5 && rig_get(act, z, 2 * cols + 1) == 0.5);
        CHECK(rig_get(act, z, 2 * cols + 2) == 0 && rig_get(act, z, 3 * cols + 1) == 0);
    }
}

static void ce(void)
{
    every(ce_one);
}

TEST_MAIN(CASE(exponential), CASE(cast), CASE(norm), CASE(rope), CASE(swiglu), CASE(bias),
          CASE(embed), CASE(ce))
