/* train/: whole steps on the CPU backend, ranks as threads of this process. Everything that must
 * not show in the result is turned and the masters compared bit for bit: chunk size, overlap,
 * slots, threads, recompute or keep, when updates run, random sleeps. Other numbers of ranks and
 * micro-batches agree within FP32 rounding. Runs under ThreadSanitizer too. */
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/mem.h"
#include "state/layout.h"
#include "test.h"
#include "train/train.h"

#define VOCAB 67
#define SEQ 11
#define ROWS 12 /* of the global batch */
#define STEPS 3

struct result {
    float *master; /* all checkpoint tensors, in layout order */
    uint64_t count;
    double loss[STEPS], norm[STEPS];
};

struct rank_run {
    struct slide_train_spec spec;
    int micro;       /* micro-batches a rank */
    int first, rows; /* this rank's part of the global batch; 0 rows: no micro-batch at all */
    int failed;
    struct slide_err err;
    struct result *result; /* rank 0's */
};

static struct slide_config tiny_config(void)
{
    struct slide_config c = {.hidden = 24,
                             .layers = 5,
                             .heads = 4,
                             .kv_heads = 2,
                             .head_dim = 6,
                             .inter = 40,
                             .vocab = VOCAB,
                             .rms_eps = 1e-5,
                             .rope_theta = 10000,
                             .rope_factor = 1,
                             .padding_idx = -1};
    snprintf(c.model_type, sizeof c.model_type, "llama");
    return c;
}

/* Row `row` of step `step`'s global batch: the same whatever rank gets it. */
static void make_row(int step, int row, int32_t *ids, int32_t *labels)
{
    uint32_t x = (uint32_t)(step * 7919 + row * 104729 + 12345);
    for (int t = 0; t < SEQ; t++) {
        x = x * 1664525u + 1013904223u;
        ids[t] = (int32_t)((x >> 8) % VOCAB);
    }
    for (int t = 0; t < SEQ; t++) /* rows have different numbers of targets */
        labels[t] = t + 1 < SEQ && (row % 3 || t % 2) ? ids[t + 1] : -100;
}

static int collect(struct slide_train *train, struct result *result, struct slide_err *err)
{
    char name[160];
    struct slide_place place;
    result->count = 0;
    for (int i = 0; slide_train_name(train, i, name, sizeof name, &place); i++)
        result->count += place.count;
    result->master = malloc(result->count * sizeof(float));
    uint64_t at = 0;
    for (int i = 0; slide_train_name(train, i, name, sizeof name, &place); i++) {
        if (slide_train_tensor(train, name, "master", result->master + at, err))
            return -1;
        at += place.count;
    }
    return 0;
}

static void *run_rank(void *arg)
{
    struct rank_run *run = arg;
    struct slide_train *train = NULL;
    int rank = run->spec.rank, micro = run->rows ? run->micro : 0;
    int rows = run->rows / run->micro;
    int32_t ids[ROWS * SEQ], labels[ROWS * SEQ];
    struct slide_batch batch[ROWS];
    struct slide_step_out out;
    run->err = SLIDE_ERR_INIT;
    run->failed = 1;
    if (slide_train_open(&train, &run->spec, &run->err) ||
        slide_train_init(train, 7, 0.3, &run->err))
        goto end;
    for (int step = 0; step < STEPS; step++) {
        for (int m = 0; m < micro; m++) {
            int first = run->first + m * rows;
            batch[m] = (struct slide_batch){.rows = rows,
                                            .seq = SEQ,
                                            .ids = ids + m * rows * SEQ,
                                            .labels = labels + m * rows * SEQ};
            for (int r = 0; r < rows; r++)
                make_row(step, first + r, ids + (m * rows + r) * SEQ,
                         labels + (m * rows + r) * SEQ);
        }
        if (slide_train_step(train, batch, micro, 1e-3, &out, &run->err))
            goto end;
        if (rank == 0) {
            run->result->loss[step] = out.loss;
            run->result->norm[step] = out.grad_norm;
        }
    }
    if (rank == 0 && collect(train, run->result, &run->err))
        goto end;
    double none[1];
    run->failed = slide_train_gather(train, "end", NULL, 0, none, &run->err);
end:
    slide_train_close(train);
    return NULL;
}

/* Runs `world` ranks with this spec; returns what rank 0 saw. `lazy` of them, the last ones, have
 * no data. */
static struct result run_lazy_world(struct slide_train_spec spec, int world, int lazy, int micro)
{
    int rows = ROWS / (world - lazy);
    struct rank_run run[4];
    pthread_t thread[4];
    struct result result = {0};
    char name[64];
    static int serial;
    snprintf(name, sizeof name, "slidedp-test-%d-%d", (int)getpid(), serial++);
    for (int r = 0; r < world; r++) {
        run[r] = (struct rank_run){.spec = spec,
                                   .micro = micro,
                                   .first = r * rows,
                                   .rows = r < world - lazy ? rows : 0,
                                   .result = &result};
        run[r].spec.rank = r;
        run[r].spec.world = world;
        run[r].spec.rendezvous = name;
        run[r].spec.agreement = "test=1\n";
        pthread_create(&thread[r], NULL, run_rank, &run[r]);
    }
    for (int r = 0; r < world; r++) {
        pthread_join(thread[r], NULL);
        if (run[r].failed)
            printf("rank %d of %d: %s\n", r, world, run[r].err.text);
        CHECK(!run[r].failed);
    }
    return result;
}

static struct result run_world(struct slide_train_spec spec, int world, int micro)
{
    return run_lazy_world(spec, world, 0, micro);
}

static struct slide_train_spec base_spec(bool bf16)
{
    struct slide_train_spec spec = SLIDE_TRAIN_SPEC_INIT;
    spec.config = tiny_config();
    spec.bf16 = bf16;
    spec.gradient_dtype = bf16 ? SLIDE_BF16 : SLIDE_F32;
    spec.max_tokens = ROWS * SEQ;
    spec.max_seq = SEQ;
    spec.threads = 1;
    spec.weight_decay = 0.1;
    spec.timeout = 60;
    return spec;
}

static void check_same(const struct result *a, const struct result *b, const char *what)
{
    int same = a->count == b->count && !memcmp(a->master, b->master, a->count * sizeof(float)) &&
               !memcmp(a->loss, b->loss, sizeof a->loss) &&
               !memcmp(a->norm, b->norm, sizeof a->norm);
    if (!same)
        printf("differs: %s\n", what);
    CHECK(same);
}

static void check_close(const struct result *a, const struct result *b, double bound)
{
    double worst = 0;
    CHECK(a->count == b->count);
    for (uint64_t i = 0; i < a->count; i++)
        worst = fmax(worst, fabs((double)a->master[i] - b->master[i]));
    if (worst > bound)
        printf("masters differ by %g\n", worst);
    CHECK(worst <= bound);
    for (int s = 0; s < STEPS; s++)
        CHECK(fabs(a->loss[s] - b->loss[s]) <= bound);
}

static void same_bits(bool bf16)
{
    struct slide_train_spec spec = base_spec(bf16);
    struct result want = run_world(spec, 1, 2), got;
    CHECK(want.count > 0 && isfinite(want.loss[STEPS - 1]));
    CHECK(want.loss[0] != want.loss[STEPS - 1]);
#define VARIANT(change, what)                                                                      \
    do {                                                                                           \
        spec = base_spec(bf16);                                                                    \
        change;                                                                                    \
        got = run_world(spec, 1, 2);                                                               \
        check_same(&want, &got, what);                                                             \
        free(got.master);                                                                          \
    } while (0)
    VARIANT(spec.chunk_bytes = 1024, "chunks of 1 KiB");
    VARIANT(spec.chunk_bytes = 3000, "chunks of 3000 bytes");
    VARIANT(spec.overlap = false, "no overlap");
    VARIANT(spec.slots = 4, "four slots");
    VARIANT(spec.threads = 3, "three threads");
    VARIANT(spec.activations = SLIDE_ACT_KEEP, "kept activations");
    VARIANT(spec.activations = SLIDE_ACT_SELECTIVE, "selective activations");
    VARIANT(spec.activations = SLIDE_ACT_OFFLOAD, "offloaded activations");
    VARIANT(spec.max_tokens = 1; spec.max_seq = 1, "memory that grows");
    VARIANT(spec.keep_gradients = true, "kept gradients");
    VARIANT(spec.defer = false, "updates at once");
    VARIANT(spec.defer = false; spec.keep_gradients = true, "updates in the step");
    VARIANT(spec.skip_nonfinite = true, "updates after the norm");
    VARIANT(spec.skip_nonfinite = true; spec.defer = false, "updates after the norm, in the step");
    VARIANT(spec.max_grad_norm = 1e6, "nothing to clip");
    free(want.master);
    /* Clipped: the bits are others, and the same whatever else. */
    spec = base_spec(bf16);
    spec.max_grad_norm = 0.5;
    struct result clipped = run_world(spec, 1, 2);
    CHECK(clipped.norm[0] > 0.5 && clipped.norm[0] == want.norm[0]);
    CHECK(clipped.norm[1] != want.norm[1]);
    spec.chunk_bytes = 5000;
    spec.threads = 3;
    spec.defer = false;
    got = run_world(spec, 1, 2);
    check_same(&clipped, &got, "clipped, other chunks, in the step");
    free(got.master);
    free(clipped.master);
}

static void same_bits_f32(void)
{
    same_bits(false);
}

static void same_bits_bf16(void)
{
    same_bits(true);
}

static void each_world(double norm)
{
    static const int shape[][2] = {{1, 4}, {2, 1}, {2, 3}, {3, 2}, {4, 3}};
    struct slide_train_spec spec = base_spec(false);
    spec.epsilon = 1e-3; /* with less AdamW makes a step of full size from the rounding of a zero */
    spec.max_grad_norm = norm;
    struct result one = run_world(spec, 1, 1);
    for (int i = 0; i < 5; i++) {
        struct result other = run_world(spec, shape[i][0], shape[i][1]);
        check_close(&one, &other, 2e-6);
        for (int s = 0; s < STEPS; s++)
            CHECK(fabs(one.norm[s] - other.norm[s]) <= 1e-5 * one.norm[s]);
        /* The same world once more: the same bits, chunks, overlap and delay whatever. */
        struct slide_train_spec again_spec = spec;
        again_spec.chunk_bytes = 2048;
        again_spec.overlap = false;
        again_spec.defer = i % 2;
        struct result again = run_world(again_spec, shape[i][0], shape[i][1]);
        check_same(&other, &again, "the same world");
        free(again.master);
        free(other.master);
    }
    free(one.master);
}

static void worlds(void)
{
    each_world(0);
}

static void worlds_clipped(void)
{
    each_world(0.5);
}

/* The four pairs of routes on 1 to 4 ranks: the same bits, whether gradients wait, are clipped, or
 * are applied at once, whatever the chunks, slots and overlap. */
static void routes(void)
{
    static const int shape[][2] = {{1, 2}, {2, 1}, {2, 3}, {3, 2}, {4, 1}};
    for (int i = 0; i < 20; i++) {
        int world = shape[i / 4][0], micro = shape[i / 4][1];
        struct slide_train_spec spec = base_spec(i % 2);
        spec.chunk_bytes = 4096;
        spec.max_grad_norm = i % 4 == 2 ? 0.5 : 0;
        spec.defer = i % 4 != 3;
        struct result want = run_world(spec, world, micro);
        for (int pair = 1; pair < 4; pair++) {
            struct slide_train_spec other = spec;
            other.delivery = pair & 1 ? SLIDE_DELIVER_SHARD : SLIDE_DELIVER_FULL;
            other.reduction = pair & 2 ? SLIDE_REDUCE_GPU : SLIDE_REDUCE_CPU;
            other.chunk_bytes = i % 3 ? 4096 : 9000;
            other.slots = 2 + i % 2;
            other.overlap = i % 5 != 0;
            struct result got = run_world(other, world, micro);
            char what[80];
            snprintf(what, sizeof what, "%d ranks, %d micro-batches, route pair %d", world, micro,
                     pair);
            check_same(&want, &got, what);
            free(got.master);
        }
        free(want.master);
    }
}

/* Ranks close at once after their last step, with updates still to do: those of their slices are
 * done all the same, and who reads the state afterwards gets it whole. */
static void *closing_rank(void *arg)
{
    struct rank_run *run = arg;
    struct slide_train *train = NULL;
    struct slide_step_out out;
    int32_t ids[ROWS * SEQ], labels[ROWS * SEQ];
    struct slide_batch batch = {.rows = ROWS, .seq = SEQ, .ids = ids, .labels = labels};
    for (int r = 0; r < ROWS; r++)
        make_row(0, r, ids + r * SEQ, labels + r * SEQ);
    run->err = SLIDE_ERR_INIT;
    run->failed = slide_train_open(&train, &run->spec, &run->err) ||
                  slide_train_init(train, 7, 0.3, &run->err) ||
                  slide_train_step(train, &batch, 1, 1e-3, &out, &run->err) ||
                  (run->spec.rank == 0 && collect(train, run->result, &run->err));
    slide_train_close(train);
    return NULL;
}

static void closing_early(void)
{
    struct rank_run run[2];
    pthread_t thread[2];
    char name[64];
    float *want = NULL;
    setenv("SLIDE_JITTER", "3", 1); /* so that rank 1 closes long before its updates are done */
    for (int i = 0; i < 4; i++) {
        struct result result = {0};
        snprintf(name, sizeof name, "slidedp-closing-%d-%d", (int)getpid(), i);
        for (int r = 0; r < 2; r++) {
            run[r] = (struct rank_run){.spec = base_spec(true), .result = &result};
            run[r].spec.rank = r;
            run[r].spec.world = 2;
            run[r].spec.rendezvous = name;
            run[r].spec.agreement = "test=1\n";
            run[r].spec.max_grad_norm = 0.5; /* all updates wait for the end of the step */
            pthread_create(&thread[r], NULL, closing_rank, &run[r]);
        }
        for (int r = 0; r < 2; r++) {
            pthread_join(thread[r], NULL);
            if (run[r].failed)
                printf("rank %d: %s\n", r, run[r].err.text);
            CHECK(!run[r].failed);
        }
        if (!want)
            want = result.master;
        else if (!run[0].failed)
            CHECK(!memcmp(want, result.master, result.count * sizeof(float)));
        if (result.master != want)
            free(result.master);
    }
    unsetenv("SLIDE_JITTER");
    free(want);
}

static void rank_without_data(void)
{
    /* The others' zeros change no sum: the same bits as without them. */
    struct slide_train_spec spec = base_spec(false);
    struct result one = run_world(spec, 1, 2);
    for (int lazy = 1; lazy <= 2; lazy++) {
        struct result other = run_lazy_world(spec, 1 + lazy, lazy, 2);
        check_same(&one, &other, "ranks without data");
        free(other.master);
    }
    free(one.master);
}

static void failing_allocations(void)
{
    /* The n-th allocation of an open fails, for each n: an error, and nothing is left. */
    struct slide_train_spec spec = base_spec(true);
    uint64_t live = slide_mem_live();
    int failures = 0;
    for (int n = 1; n < 400; n++) {
        struct slide_train *train = NULL;
        struct slide_err err = SLIDE_ERR_INIT;
        slide_mem_fail_at(n);
        int failed = slide_train_open(&train, &spec, &err);
        slide_mem_fail_at(0);
        if (!failed) {
            slide_train_close(train);
            CHECK(slide_mem_live() == live);
            break;
        }
        failures++;
        CHECK(train == NULL && err.code != SLIDE_OK && err.text[0]);
        CHECK(slide_mem_live() == live);
    }
    CHECK(failures > 10);
}

/* A head wider than the micro-batch is long: what passes through the staging must fit it. Only a
 * sanitizer or a corrupted heap shows when it does not. */
static void wide_heads(void)
{
    struct slide_train_spec spec = base_spec(true);
    int32_t ids[2] = {0, 1};
    struct slide_batch batch = {.rows = 1, .seq = 2, .ids = ids, .labels = ids};
    spec.config.head_dim = 512;
    spec.max_tokens = spec.max_seq = 2;
    for (int i = 0; i < 4; i++) {
        struct slide_train *train = NULL;
        struct slide_err err = SLIDE_ERR_INIT;
        struct slide_step_out out;
        CHECK(slide_train_open(&train, &spec, &err) == 0);
        CHECK(slide_train_init(train, 1, 0.1, &err) == 0);
        CHECK(slide_train_step(train, &batch, 1, 1e-3, &out, &err) == 0 && isfinite(out.loss));
        slide_train_close(train);
    }
}

static void bad_arguments(void)
{
    struct slide_train_spec spec = base_spec(true);
    struct slide_train *train = NULL;
    struct slide_err err = SLIDE_ERR_INIT;
    struct slide_step_out out;
    int32_t ids[2] = {0, VOCAB};
    struct slide_batch batch = {.rows = 1, .seq = 2, .ids = ids};
    spec.slots = 1;
    CHECK(slide_train_open(&train, &spec, &err) == -1 && err.code == SLIDE_EINVAL);
    spec = base_spec(true);
    spec.device = "abacus";
    err = SLIDE_ERR_INIT;
    CHECK(slide_train_open(&train, &spec, &err) == -1 && strstr(err.text, "abacus"));
    spec = base_spec(true);
    err = SLIDE_ERR_INIT;
    CHECK(slide_train_open(&train, &spec, &err) == 0);
    CHECK(slide_train_step(train, &batch, 1, 1e-3, &out, &err) == -1); /* no weights yet */
    err = SLIDE_ERR_INIT;
    CHECK(slide_train_init(train, 1, 0.1, &err) == 0);
    CHECK(slide_train_step(train, &batch, 1, 1e-3, &out, &err) == -1 && err.code == SLIDE_EINVAL);
    CHECK(strstr(err.text, "column 1") && strstr(err.text, "67"));
    ids[1] = 1; /* the refusal changed nothing: the next step works, and has no target */
    err = SLIDE_ERR_INIT;
    CHECK(slide_train_step(train, &batch, 1, 1e-3, &out, &err) == 0);
    CHECK(out.skipped && out.step == 0);
    slide_train_close(train);
}

TEST_MAIN(CASE(same_bits_f32), CASE(same_bits_bf16), CASE(worlds), CASE(worlds_clipped),
          CASE(routes), CASE(closing_early), CASE(rank_without_data), CASE(failing_allocations),
          CASE(wide_heads), CASE(bad_arguments))
