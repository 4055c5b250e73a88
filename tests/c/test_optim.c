/* csrc/optim: AdamW and the flat loops. Each loop is compared bit for bit with a plain scalar
 * reference in this file, for every instruction set of this CPU, at odd addresses, lengths around
 * the width of a vector and of a block, and any cut; AdamW also with a double-precision reference.
 * NaN are compared as NaN: their sign and payload are nobody's promise. */
#include <math.h>
#include <string.h>

#include "base/dtype.h"
#include "base/isa.h"
#include "optim/adamw.h"
#include "optim/ftz.h"
#include "optim/vec.h"
#include "test.h"

#define MOST 1100 /* elements of the longest case */
#define ROOM (MOST + 64)
#define COUNT(a) ((int)(sizeof(a) / sizeof *(a)))

static const int lengths[] = {0, 1, 2, 15, 16, 17, 31, 63, 64, 65, 127, 128, 129, 1009};
static const int offsets[] = {0, 1, 3, 8, 13};

static uint64_t random_state; /* each case starts it from test_seed: it runs alone as well */

static uint32_t random_bits(void)
{
    return (uint32_t)(test_random(&random_state) >> 32);
}

static float uniform(void) /* [-1, 1) */
{
    return (float)(int32_t)random_bits() * 0x1p-31f;
}

static int same_f32(float a, float b)
{
    return slide_f32_bits(a) == slide_f32_bits(b) || (isnan(a) && isnan(b));
}

/* ---- AdamW ---- */

struct planes {
    uint16_t hi[ROOM];
    int16_t lo[ROOM];
    float master[ROOM], m[ROOM], v[ROOM], grad[ROOM];
};

/* A gradient as training gives it, and now and then what it must survive. */
static float some_gradient(void)
{
    static const float odd[] = {0.0f, -0.0f, INFINITY, -INFINITY, NAN, 1e-42f, -3e38f, 1e20f};
    uint32_t pick = random_bits() % 64;
    return pick < (uint32_t)COUNT(odd) ? odd[pick] : uniform() * 1e-2f;
}

static void fill(struct planes *p, int finite)
{
    for (int i = 0; i < ROOM; i++) {
        p->master[i] = uniform();
        p->hi[i] = slide_master_hi(slide_f32_bits(p->master[i]));
        p->lo[i] = slide_master_lo(slide_f32_bits(p->master[i]));
        p->m[i] = uniform() * 1e-3f;
        p->v[i] = fabsf(uniform()) * 1e-6f;
        p->grad[i] = finite ? uniform() * 1e-2f : some_gradient();
    }
}

/* The statement of adamw.h, one operation at a time; volatile keeps a compiler from contracting. */
static uint64_t scalar_adamw(const struct slide_adamw *a, struct planes *p, int first, int n)
{
    uint64_t bad = 0, before = slide_ftz_enter();
    for (int i = first; i < first + n; i++) {
        volatile float g = p->grad[i], m = p->m[i], v = p->v[i], w = p->master[i], t, u;
        t = g - m;
        t = a->one_minus_beta1 * t;
        m = m + t;
        t = a->one_minus_beta2 * g;
        t = t * g;
        v = a->beta2 * v;
        v = v + t;
        t = sqrtf(v);
        t = t * a->inv_sqrt_bias2;
        t = t + a->eps;
        u = a->step_size * m;
        u = u / t;
        w = w * a->keep;
        w = w - u;
        bad += !isfinite(p->grad[i]);
        p->m[i] = m;
        p->v[i] = v;
        p->master[i] = w;
        p->hi[i] = slide_master_hi(slide_f32_bits(w));
        p->lo[i] = slide_master_lo(slide_f32_bits(w));
    }
    slide_ftz_leave(before);
    return bad;
}

/* Everything equal, what lies outside the range included. */
static int same_planes(const struct planes *a, const struct planes *b, int split)
{
    for (int i = 0; i < ROOM; i++) {
        float x = a->master[i], y = b->master[i];
        if (split) {
            x = slide_f32_from_bits(slide_master_bits(a->hi[i], a->lo[i]));
            y = slide_f32_from_bits(slide_master_bits(b->hi[i], b->lo[i]));
        }
        if (!same_f32(x, y) || !same_f32(a->m[i], b->m[i]) || !same_f32(a->v[i], b->v[i]))
            return 0;
        if (split && !isnan(x) && (a->hi[i] != b->hi[i] || a->lo[i] != b->lo[i]))
            return 0;
    }
    return 1;
}

/* The range [first, first + n) in pieces of `cut`. */
static uint64_t update(enum slide_isa isa, const struct slide_adamw *a, struct planes *p, int first,
                       int n, int cut, int split)
{
    uint64_t bad = 0;
    for (int at = first; at < first + n; at += cut) {
        int end = at + cut < first + n ? at + cut : first + n;
        uint64_t count = (uint64_t)(end - at);
        bad += split ? slide_adamw_split(isa, a, p->hi + at, p->lo + at, p->m + at, p->v + at,
                                         p->grad + at, count)
                     : slide_adamw_f32(isa, a, p->master + at, p->m + at, p->v + at, p->grad + at,
                                       count);
    }
    return bad;
}

static const struct slide_adamw_hyper usual = {
    .lr = 1e-3,
    .beta1 = 0.9,
    .beta2 = 0.999,
    .eps = 1e-8,
    .weight_decay = 0.1,
    .step = 3,
};

static void adamw_same_bits(void)
{
    random_state = test_seed;
    static const int cuts[] = {ROOM, 1, 16, 37, 64, 100};
    static struct planes start, want, got;
    struct slide_adamw a = slide_adamw_prepare(&usual, 1);
    for (int l = 0; l < COUNT(lengths); l++) {
        for (int o = 0; o < COUNT(offsets); o++) {
            int n = lengths[l], first = offsets[o];
            fill(&start, 0);
            want = start;
            uint64_t bad = scalar_adamw(&a, &want, first, n);
            for (int isa = 0; isa <= (int)slide_isa_best(); isa++) {
                for (int c = 0; c < COUNT(cuts); c++) {
                    for (int split = 0; split < 2; split++) {
                        got = start;
                        CHECK(update(isa, &a, &got, first, n, cuts[c], split) == bad);
                        CHECK(same_planes(&got, &want, split));
                    }
                }
            }
        }
    }
}

/* Many steps: (hi, lo) is the FP32 master all along. */
static void adamw_split_is_f32(void)
{
    random_state = test_seed;
    static struct planes p, q;
    struct slide_adamw_hyper hyper = usual;
    fill(&p, 1);
    q = p;
    for (hyper.step = 1; hyper.step <= 100; hyper.step++) {
        struct slide_adamw a = slide_adamw_prepare(&hyper, 1);
        for (int i = 0; i < ROOM; i++)
            p.grad[i] = q.grad[i] = uniform() * 1e-2f;
        CHECK(update(slide_isa_best(), &a, &p, 0, 1009, ROOM, 1) == 0);
        CHECK(update(slide_isa_best(), &a, &q, 0, 1009, ROOM, 0) == 0);
        for (int i = 0; i < ROOM; i++) {
            CHECK(slide_master_bits(p.hi[i], p.lo[i]) == slide_f32_bits(q.master[i]));
            CHECK(same_f32(p.m[i], q.m[i]) && same_f32(p.v[i], q.v[i]));
        }
    }
}

/* One step against the formula in double. The bounds count roundings: u is half a last place. */
static void adamw_reference(void)
{
    random_state = test_seed;
    static const struct slide_adamw_hyper cases[] = {
        {.lr = 1e-3, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .weight_decay = 0.1, .step = 1},
        {.lr = 2e-5, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .weight_decay = 0.0, .step = 20},
        {.lr = 1e-1, .beta1 = 0.0, .beta2 = 0.5, .eps = 1e-3, .weight_decay = 1.0, .step = 7},
        {.lr = 1e-4,
         .beta1 = 0.95,
         .beta2 = 0.9999,
         .eps = 1e-6,
         .weight_decay = 0.01,
         .step = 1000003},
    };
    static struct planes p, before;
    const double u = 0x1p-24;
    for (int c = 0; c < 2 * COUNT(cases); c++) {
        const struct slide_adamw_hyper *h = &cases[c / 2];
        int decay = c % 2;
        struct slide_adamw a = slide_adamw_prepare(h, decay);
        fill(&p, 1);
        before = p;
        update(slide_isa_best(), &a, &p, 0, MOST, MOST, 0);
        for (int i = 0; i < MOST; i++) {
            double g = before.grad[i], w = before.master[i];
            double m = before.m[i] + (1 - h->beta1) * (g - before.m[i]);
            double v = h->beta2 * before.v[i] + (1 - h->beta2) * g * g;
            double bias1 = 1 - pow(h->beta1, (double)h->step);
            double bias2 = 1 - pow(h->beta2, (double)h->step);
            double size_m = fabs(before.m[i]) + (1 - h->beta1) * fabs(g - before.m[i]);
            double denominator = sqrt(v) / sqrt(bias2) + h->eps;
            double change = h->lr / bias1 * m / denominator;
            double error_m = 4 * u * size_m;
            double error_change = h->lr / bias1 * error_m / denominator + 10 * u * fabs(change);
            w = w * (decay ? 1 - h->lr * h->weight_decay : 1) - change;
            CHECK(fabs(p.m[i] - m) <= error_m);
            CHECK(fabs(p.v[i] - v) <= 5 * u * v);
            CHECK(fabs(p.master[i] - w) <=
                  error_change + 4 * u * (fabs((double)before.master[i]) + fabs(change)));
        }
    }
}

/* Step 1 with nothing remembered moves by lr against the sign of the gradient. */
static void adamw_first_step(void)
{
    struct slide_adamw_hyper h = {.lr = 0.5, .beta1 = 0.9, .beta2 = 0.999, .eps = 0, .step = 1};
    struct slide_adamw a = slide_adamw_prepare(&h, 1);
    float w[3] = {1, 1, 1}, m[3] = {0}, v[3] = {0}, g[3] = {1e-3f, -7.0f, 2.5e-8f};
    CHECK(slide_adamw_f32(slide_isa_best(), &a, w, m, v, g, 3) == 0);
    CHECK(fabsf(w[0] - 0.5f) < 1e-6f && fabsf(w[1] - 1.5f) < 1e-6f && fabsf(w[2] - 0.5f) < 1e-6f);
}

/* Padding: zero, with zero gradients, stays zero, with decay or without, to the sign. */
static void adamw_zero(void)
{
    random_state = test_seed;
    static struct planes p;
    for (int decay = 0; decay < 2; decay++) {
        struct slide_adamw a = slide_adamw_prepare(&usual, decay);
        CHECK(decay || a.keep == 1.0f);
        for (int isa = 0; isa <= (int)slide_isa_best(); isa++) {
            memset(&p, 0, sizeof p);
            CHECK(update(isa, &a, &p, 0, 1009, ROOM, 0) == 0);
            CHECK(update(isa, &a, &p, 0, 1009, ROOM, 1) == 0);
            for (int i = 0; i < ROOM; i++)
                CHECK(slide_f32_bits(p.master[i]) == 0 && p.hi[i] == 0 && p.lo[i] == 0 &&
                      slide_f32_bits(p.m[i]) == 0 && slide_f32_bits(p.v[i]) == 0);
        }
    }
    /* Without decay and without anything remembered a weight keeps its bits. */
    struct slide_adamw a = slide_adamw_prepare(&usual, 0);
    static struct planes before;
    fill(&p, 1);
    memset(p.m, 0, sizeof p.m);
    memset(p.v, 0, sizeof p.v);
    memset(p.grad, 0, sizeof p.grad);
    before = p;
    update(slide_isa_best(), &a, &p, 0, 1009, ROOM, 1);
    CHECK(memcmp(&p, &before, sizeof p) == 0);
}

/* A moment that has become subnormal counts as zero, and stays it. */
static void adamw_flushes_subnormals(void)
{
    const struct slide_adamw a = slide_adamw_prepare(&usual, 0);
    for (int isa = 0; isa <= (int)slide_isa_best(); isa++) {
        float w[3] = {1, 1e-40f, -1}, m[3] = {1e-40f, -1e-40f, 1e-30f}, v[3] = {1e-41f, 0, 0};
        float g[3] = {0, 0, 0};
        CHECK(slide_adamw_f32(isa, &a, w, m, v, g, 3) == 0);
        CHECK(w[0] == 1 && m[0] == 0 && v[0] == 0);
        CHECK(w[1] == 0 && m[1] == 0);
        CHECK(m[2] > 0 && m[2] < 1e-30f); /* normal: as ever */
    }
    volatile float small = 1e-30f; /* the caller's own arithmetic is as before */
    CHECK(small * 1e-10f > 0);
}

static void adamw_counts_nonfinite(void)
{
    random_state = test_seed;
    static const uint32_t bad[] = {0x7f800000, 0xff800000, 0x7fc00000, 0xffc00000, 0x7f800001};
    static const uint32_t good[] = {0, 0x80000000, 0x7f7fffff, 0xff7fffff, 1, 0x807fffff};
    static struct planes p;
    struct slide_adamw a = slide_adamw_prepare(&usual, 1);
    for (int isa = 0; isa <= (int)slide_isa_best(); isa++) {
        for (int l = 0; l < COUNT(lengths); l++) {
            uint64_t want = 0;
            fill(&p, 1);
            for (int i = 0; i < ROOM; i++) {
                uint32_t r = random_bits();
                int spoil = r % 3 == 0;
                r = r / 3 % 5;
                p.grad[i] = slide_f32_from_bits(spoil ? bad[r] : good[r]);
                want += (uint64_t)(spoil && i < lengths[l]);
            }
            for (int split = 0; split < 2; split++) {
                CHECK(update(isa, &a, &p, 0, lengths[l], ROOM, split) == want);
            }
        }
        fill(&p, 1);
        p.grad[77] = INFINITY;
        CHECK(update(isa, &a, &p, 0, 1009, ROOM, 1) == 1);
        CHECK(isnan(slide_f32_from_bits(slide_master_bits(p.hi[77], p.lo[77]))));
        CHECK(isnan(slide_bf16_to_f32(p.hi[77]))); /* seen by whoever reads hi alone */
    }
}

/* ---- master weights in two planes ---- */

static void check_split(const uint32_t *bits, int n)
{
    static float in[65536 * 2], out[65536 * 2];
    static uint16_t hi[65536 * 2];
    static int16_t lo[65536 * 2];
    memcpy(in, bits, (size_t)n * sizeof *in);
    for (int isa = 0; isa <= (int)slide_isa_best(); isa++) {
        memset(out, 0, sizeof out);
        slide_vec_split(isa, hi, lo, in, (uint64_t)n);
        slide_vec_join(isa, out, hi, lo, (uint64_t)n);
        CHECK(memcmp(out, bits, (size_t)n * sizeof *out) == 0);
        for (int i = 0; i < n; i++) {
            uint32_t up = (bits[i] & 0xffff) >= 0x8000; /* nearest, ties away from zero */
            CHECK(hi[i] == (uint16_t)((bits[i] >> 16) + up));
            CHECK(hi[i] == slide_master_hi(bits[i]) && lo[i] == slide_master_lo(bits[i]));
        }
    }
}

static void split_join(void)
{
    random_state = test_seed;
    static const uint32_t low[] = {0, 1, 2, 0x7ffe, 0x7fff, 0x8000, 0x8001, 0xfffe, 0xffff};
    static uint32_t bits[65536];
    for (int k = 0; k < COUNT(low); k++) {
        for (uint32_t i = 0; i < 65536; i++)
            bits[i] = i << 16 | low[k];
        check_split(bits, 65536);
    }
    for (int k = 0; k < 32; k++) {
        for (int i = 0; i < 65536; i++)
            bits[i] = random_bits();
        check_split(bits, 65535 - k);
    }
    /* What `hi` alone reads: NaN of the processor stay NaN, others may not; the largest are Inf. */
    CHECK(slide_master_hi(0x7fc00000) == 0x7fc0 && slide_master_hi(0xffc00000) == 0xffc0);
    CHECK(slide_master_hi(0x7f800001) == 0x7f80 && slide_master_hi(0x7fffffff) == 0x8000);
    CHECK(slide_master_hi(0x7f800000) == 0x7f80 && slide_master_hi(0x7f7fffff) == 0x7f80);
}

/* ---- sums ---- */

static void sum(void)
{
    random_state = test_seed;
    enum { RANKS = 5 };
    static float in[RANKS][ROOM], out[ROOM];
    static uint16_t half[RANKS][ROOM];
    for (int l = 0; l < COUNT(lengths); l++) {
        for (int o = 0; o < COUNT(offsets); o++) {
            int n = lengths[l], first = offsets[o];
            for (int k = 0; k < RANKS; k++) {
                for (int i = 0; i < ROOM; i++) { /* magnitudes far apart: the order shows */
                    in[k][i] = ldexpf(uniform(), (int)(random_bits() % 40) - 20);
                    half[k][i] = slide_f32_to_bf16(in[k][i]);
                }
                in[k][first] = -0.0f;
                half[k][first] = 0x8000;
            }
            for (int c = 0; c < RANKS * 2; c++) {
                int count = c / 2 + 1, bf16 = c % 2;
                const void *from[RANKS];
                for (int k = 0; k < RANKS; k++)
                    from[k] = bf16 ? (const void *)(half[k] + first) : in[k] + first;
                for (int isa = 0; isa <= (int)slide_isa_best(); isa++) {
                    for (int i = 0; i < ROOM; i++)
                        out[i] = 7;
                    slide_vec_sum(isa, out + first, from, count, bf16 ? SLIDE_BF16 : SLIDE_F32,
                                  (uint64_t)n);
                    for (int i = 0; i < ROOM; i++) {
                        volatile float want = bf16 ? slide_bf16_to_f32(half[0][i]) : in[0][i];
                        for (int k = 1; k < count; k++)
                            want = want + (bf16 ? slide_bf16_to_f32(half[k][i]) : in[k][i]);
                        int inside = i >= first && i < first + n;
                        CHECK(slide_f32_bits(out[i]) == slide_f32_bits(inside ? want : 7));
                    }
                }
            }
            /* Into one of the inputs. */
            const void *from[3] = {in[0] + first, in[1] + first, in[2] + first};
            memcpy(out, in[1], sizeof out);
            slide_vec_sum(slide_isa_best(), in[1] + first, from, 3, SLIDE_F32, (uint64_t)n);
            for (int i = first; i < first + n; i++) {
                volatile float want = in[0][i] + out[i];
                want = want + in[2][i];
                CHECK(slide_f32_bits(in[1][i]) == slide_f32_bits(want));
            }
        }
    }
}

static void squares(void)
{
    random_state = test_seed;
    static float in[ROOM];
    for (int l = 0; l < COUNT(lengths); l++) {
        for (int o = 0; o < COUNT(offsets); o++) {
            int n = lengths[l], first = offsets[o];
            double lane[SLIDE_VEC_LANES] = {0}, want = 0;
            long double plain = 0;
            for (int i = 0; i < ROOM; i++)
                in[i] = ldexpf(uniform(), (int)(random_bits() % 40) - 20);
            for (int i = 0; i < n; i++) {
                double x = in[first + i];
                lane[i % SLIDE_VEC_LANES] += x * x;
                plain += (long double)x * x;
            }
            for (int k = 0; k < SLIDE_VEC_LANES; k++)
                want += lane[k];
            CHECK(fabsl((long double)want - plain) <= 1e-13L * plain);
            for (int isa = 0; isa <= (int)slide_isa_best(); isa++)
                CHECK(slide_vec_squares(isa, in + first, (uint64_t)n) == want);
        }
    }
    in[3] = INFINITY;
    CHECK(isinf(slide_vec_squares(slide_isa_best(), in, 100)));
    in[7] = NAN;
    CHECK(isnan(slide_vec_squares(slide_isa_best(), in, 100)));
    in[3] = in[7] = 3e38f; /* squares past FP32's range */
    CHECK(isfinite(slide_vec_squares(slide_isa_best(), in, 100)));
}

/* ---- conversions ---- */

/* The value of an FP16 pattern by its definition. */
static float f16_value(uint16_t x)
{
    int exponent = x >> 10 & 31, fraction = x & 1023;
    float size = exponent == 0    ? ldexpf((float)fraction, -24)
                 : exponent == 31 ? (fraction ? NAN : INFINITY)
                                  : ldexpf((float)(fraction + 1024), exponent - 25);
    return x & 0x8000 ? -size : size;
}

static int f16_is_nan(uint16_t x)
{
    return (x & 0x7fff) > 0x7c00;
}

static uint16_t one_f16(enum slide_isa isa, float x)
{
    uint16_t out;
    slide_vec_convert(isa, &out, SLIDE_F16, &x, SLIDE_F32, 1);
    return out;
}

static void convert_patterns(void)
{
    static uint16_t all[65536], back[65536];
    static float wide[65536];
    for (int i = 0; i < 65536; i++)
        all[i] = (uint16_t)i;
    for (int isa = 0; isa <= (int)slide_isa_best(); isa++) {
        slide_vec_convert(isa, wide, SLIDE_F32, all, SLIDE_BF16, 65536);
        slide_vec_convert(isa, back, SLIDE_BF16, wide, SLIDE_F32, 65536);
        for (int i = 0; i < 65536; i++) {
            CHECK(slide_f32_bits(wide[i]) == (uint32_t)i << 16);
            CHECK(back[i] == i || (isnan(wide[i]) && back[i] == (i | 0x40)));
        }
        slide_vec_convert(isa, back, SLIDE_F16, all, SLIDE_BF16, 65536);
        for (int i = 0; i < 65536; i++)
            CHECK(back[i] == one_f16(SLIDE_ISA_BASE, wide[i]));

        slide_vec_convert(isa, wide, SLIDE_F32, all, SLIDE_F16, 65536);
        slide_vec_convert(isa, back, SLIDE_F16, wide, SLIDE_F32, 65536);
        for (int i = 0; i < 65536; i++) {
            CHECK(same_f32(wide[i], f16_value(all[i])));
            CHECK(same_f32(wide[i], slide_f16_to_f32(all[i])));
            CHECK(!signbit(wide[i]) == !(i & 0x8000));
            CHECK(back[i] == i || (f16_is_nan(all[i]) && f16_is_nan(back[i])));
            CHECK((back[i] & 0x8000) == (i & 0x8000));
        }
        slide_vec_convert(isa, back, SLIDE_BF16, all, SLIDE_F16, 65536);
        for (int i = 0; i < 65536; i++)
            CHECK(back[i] == slide_f32_to_bf16(wide[i]));
    }
}

/* Between each FP16 value and the next: just below, at, and just above the middle. */
static void convert_f16_rounding(void)
{
    for (uint32_t sign = 0; sign < 2; sign++) {
        for (uint32_t i = 0; i < 0x7c00; i++) {
            uint16_t low = (uint16_t)(i | sign << 15), high = (uint16_t)(low + 1);
            float next = i == 0x7bff ? (sign ? -65536.0f : 65536.0f) : f16_value(high);
            float middle = (float)(((double)f16_value(low) + next) / 2);
            float below = nextafterf(middle, 0), above = nextafterf(middle, next * 2);
            float in[4] = {f16_value(low), below, middle, above};
            uint16_t want[4] = {low, low, low & 1 ? high : low, high}, out[4];
            for (int isa = 0; isa <= (int)slide_isa_best(); isa++) {
                slide_vec_convert(isa, out, SLIDE_F16, in, SLIDE_F32, 4);
                CHECK(memcmp(out, want, sizeof out) == 0);
            }
            for (int k = 0; k < 4; k++)
                CHECK(slide_f32_to_f16(in[k]) == want[k]);
        }
    }
    CHECK(one_f16(slide_isa_best(), 3e38f) == 0x7c00);
    CHECK(one_f16(slide_isa_best(), -INFINITY) == 0xfc00);
    CHECK(one_f16(slide_isa_best(), -1e-40f) == 0x8000);
    CHECK(f16_is_nan(one_f16(slide_isa_best(), slide_f32_from_bits(0x7f800001))));
}

/* Any length and address; random FP32 patterns, NaN and all, give the same bits from each set. */
static void convert_ranges(void)
{
    random_state = test_seed;
    static const enum slide_dtype types[] = {SLIDE_F32, SLIDE_BF16, SLIDE_F16};
    static unsigned char in[ROOM * 4], out[ROOM * 4], want[ROOM * 4];
    for (int l = 0; l < COUNT(lengths); l++) {
        for (int o = 0; o < COUNT(offsets); o++) {
            for (int c = 0; c < 9; c++) {
                enum slide_dtype to = types[c / 3], from = types[c % 3];
                size_t wide = slide_dtype_size(to), narrow = slide_dtype_size(from);
                size_t first = (size_t)offsets[o], n = (size_t)lengths[l];
                for (size_t i = 0; i < sizeof in; i++)
                    in[i] = (unsigned char)random_bits();
                memset(want, 0x55, sizeof want);
                for (size_t i = first; i < first + n; i++) /* one at a time */
                    slide_vec_convert(SLIDE_ISA_BASE, want + i * wide, to, in + i * narrow, from,
                                      1);
                if (to == from)
                    CHECK(memcmp(want + first * wide, in + first * wide, n * wide) == 0);
                for (int isa = 0; isa <= (int)slide_isa_best(); isa++) {
                    memset(out, 0x55, sizeof out);
                    slide_vec_convert(isa, out + first * wide, to, in + first * narrow, from, n);
                    CHECK(memcmp(out, want, sizeof out) == 0);
                }
                if (to == SLIDE_BF16 && from == SLIDE_F32) {
                    for (size_t i = first; i < first + n; i++) {
                        float x;
                        uint16_t y;
                        memcpy(&x, in + i * 4, 4);
                        memcpy(&y, want + i * 2, 2);
                        CHECK(y == slide_f32_to_bf16(x));
                    }
                }
            }
        }
    }
}

TEST_MAIN(CASE(adamw_same_bits), CASE(adamw_split_is_f32), CASE(adamw_reference),
          CASE(adamw_first_step), CASE(adamw_zero), CASE(adamw_flushes_subnormals),
          CASE(adamw_counts_nonfinite), CASE(split_join), CASE(sum), CASE(squares),
          CASE(convert_patterns), CASE(convert_f16_rounding), CASE(convert_ranges))
