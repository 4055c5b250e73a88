/* The state's ways in and out: loading and storing checkpoint tensors, fresh weights, reading a
 * tensor. Every rank moves the bytes of its own slices only, in pieces, on its pool, straight
 * between file and planes; no tensor is ever whole anywhere else, so loading peaks at the state
 * itself. */
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/fault.h"
#include "base/mem.h"
#include "optim/vec.h"
#include "train/rank.h"

#define PIECE (1u << 18) /* elements: 1 MiB of FP32 a thread */

struct piece {
    int part, unit;
    uint64_t at;   /* elements from the unit's start */
    uint64_t file; /* byte offset */
    uint64_t count;
};

struct mover {
    struct slide_train *train;
    const struct slide_part *part;
    struct piece *piece;
    int64_t pieces, base; /* base: first of the group under way */
    unsigned char *raw;   /* [threads, PIECE * 4] */
    float *wide;          /* [threads, PIECE] */
    int (*move)(struct mover *, const struct piece *, unsigned char *, float *, struct slide_err *);
    pthread_mutex_t lock; /* guards err */
    struct slide_err err;
};

static void *plane_at(const struct slide_train *train, int unit, enum slide_plane plane,
                      uint64_t at)
{
    size_t size = slide_layout_plane_size(&train->layout, plane);
    return slide_host_at(&train->host, train->layout.unit[unit].plane[plane] + at * size);
}

/* FP32 masters [at, at + n) of a unit from and to plain FP32. */
static void put_master(struct slide_train *train, int unit, uint64_t at, const float *in,
                       uint64_t n)
{
    if (train->layout.split)
        slide_vec_split(train->isa, plane_at(train, unit, SLIDE_PLANE_HI, at),
                        plane_at(train, unit, SLIDE_PLANE_LO, at), in, n);
    else
        memcpy(plane_at(train, unit, SLIDE_PLANE_HI, at), in, n * sizeof *in);
}

static void get_master(struct slide_train *train, int unit, uint64_t at, float *out, uint64_t n)
{
    if (train->layout.split)
        slide_vec_join(train->isa, out, plane_at(train, unit, SLIDE_PLANE_HI, at),
                       plane_at(train, unit, SLIDE_PLANE_LO, at), n);
    else
        memcpy(out, plane_at(train, unit, SLIDE_PLANE_HI, at), n * sizeof *out);
}

/* All of `bytes` at `offset`, whatever the kernel gives at a time. */
static int whole(int fd, bool out, unsigned char *memory, size_t bytes, uint64_t offset,
                 const struct slide_part *part, struct slide_err *err)
{
    for (size_t done = 0; done < bytes;) {
        ssize_t n = out ? pwrite(fd, memory + done, bytes - done, (off_t)(offset + done))
                        : pread(fd, memory + done, bytes - done, (off_t)(offset + done));
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return slide_err_os(err, errno, "%s %s: tensor %s", out ? "writing" : "reading",
                                part->path, part->name);
        if (n == 0)
            return slide_err_set(err, SLIDE_EIO,
                                 "%s ends inside tensor %s (at byte %llu): the file is truncated",
                                 part->path, part->name, (unsigned long long)(offset + done));
        done += (size_t)n;
    }
    return 0;
}

static int move_in(struct mover *m, const struct piece *p, unsigned char *raw, float *wide,
                   struct slide_err *err)
{
    const struct slide_part *part = &m->part[p->part];
    int fd = open(part->path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return slide_err_os(err, errno, "opening %s", part->path);
    int failed =
        whole(fd, false, raw, p->count * slide_dtype_size(part->dtype), p->file, part, err);
    close(fd);
    if (failed)
        return -1;
    slide_vec_convert(m->train->isa, wide, SLIDE_F32, raw, part->dtype, p->count);
    for (uint64_t i = 0; i < p->count; i++)
        if ((slide_f32_bits(wide[i]) & 0x7f800000u) == 0x7f800000u)
            return slide_err_set(err, SLIDE_EINVAL, "%s: tensor %s has an Inf or a NaN", part->path,
                                 part->name);
    put_master(m->train, p->unit, p->at, wide, p->count);
    return 0;
}

static bool has_nonfinite(const unsigned char *raw, enum slide_dtype dtype, uint64_t n)
{
    const uint16_t exponent = dtype == SLIDE_F16 ? 0x7c00 : 0x7f80;
    for (uint64_t i = 0; i < n; i++) {
        uint16_t high; /* the half with the exponent; little-endian, as safetensors is */
        memcpy(&high, raw + (dtype == SLIDE_F32 ? 4 * i + 2 : 2 * i), sizeof high);
        if ((high & exponent) == exponent)
            return true;
    }
    return false;
}

static int move_out(struct mover *m, const struct piece *p, unsigned char *raw, float *wide,
                    struct slide_err *err)
{
    const struct slide_part *part = &m->part[p->part];
    size_t bytes = p->count * slide_dtype_size(part->dtype);
    if (part->dtype == SLIDE_BF16 && m->train->layout.split) {
        /* The very weights that we compute with. */
        memcpy(raw, plane_at(m->train, p->unit, SLIDE_PLANE_HI, p->at), bytes);
    } else {
        get_master(m->train, p->unit, p->at, wide, p->count);
        slide_vec_convert(m->train->isa, raw, part->dtype, wide, SLIDE_F32, p->count);
    }
    if (has_nonfinite(raw, part->dtype, p->count))
        return slide_err_set(err, SLIDE_EINVAL,
                             "tensor %s has an Inf or a NaN, or does not fit its file's format: "
                             "it is not saved",
                             part->name);
    int fd = open(part->path, O_WRONLY | O_CLOEXEC);
    if (fd < 0)
        return slide_err_os(err, errno, "opening %s", part->path);
    int failed = whole(fd, true, raw, bytes, p->file, part, err);
    if (close(fd) && !failed)
        failed = slide_err_os(err, errno, "closing %s", part->path);
    return failed;
}

static void move_piece(void *ctx, int64_t i, int worker)
{
    struct mover *m = ctx;
    struct slide_err err = SLIDE_ERR_INIT;
    const struct piece *piece = &m->piece[m->base + i];
    if (m->move(m, piece, m->raw + (size_t)worker * PIECE * 4, m->wide + (size_t)worker * PIECE,
                &err)) {
        pthread_mutex_lock(&m->lock);
        if (!m->err.code)
            m->err = err;
        pthread_mutex_unlock(&m->lock);
    }
}

/* The pieces of this rank's slices. Two walks: to count, and to fill. */
static int64_t cut(const struct slide_train *train, const struct slide_part *part, int parts,
                   const struct slide_place *place, struct piece *out)
{
    int64_t n = 0;
    for (int i = 0; i < parts; i++) {
        uint64_t first, end, from = place[i].offset, to = place[i].offset + place[i].count;
        slide_layout_slice(&train->layout, place[i].unit, train->spec.rank, &first, &end);
        from = from > first ? from : first;
        to = to < end ? to : end;
        for (uint64_t at = from; at < to; at += PIECE, n++)
            if (out)
                out[n] =
                    (struct piece){.part = i,
                                   .unit = place[i].unit,
                                   .at = at,
                                   .file = part[i].offset +
                                           (at - place[i].offset) * slide_dtype_size(part[i].dtype),
                                   .count = to - at < PIECE ? to - at : PIECE};
    }
    return n;
}

/* Finds every part's place and checks that parts cover the model's tensors, each once. */
static int find_places(struct slide_train *train, const struct slide_part *part, int parts,
                       struct slide_place *place, struct slide_err *err)
{
    uint64_t covered = 0;
    for (int i = 0; i < parts; i++) {
        if (slide_layout_find(&train->layout, part[i].name, &place[i]))
            return slide_err_set(err, SLIDE_EINVAL, "the model has no tensor %s", part[i].name);
        if (part[i].count != place[i].count)
            return slide_err_set(err, SLIDE_EINVAL,
                                 "tensor %s has %llu elements in %s, the model wants %lld x %lld",
                                 part[i].name, (unsigned long long)part[i].count, part[i].path,
                                 (long long)place[i].rows, (long long)place[i].cols);
        if (part[i].dtype != SLIDE_F32 && part[i].dtype != SLIDE_BF16 && part[i].dtype != SLIDE_F16)
            return slide_err_set(err, SLIDE_EINVAL, "tensor %s: weights are F32, BF16 or F16",
                                 part[i].name);
        for (int k = 0; k < i; k++)
            if (place[k].unit == place[i].unit && place[k].offset == place[i].offset)
                return slide_err_set(err, SLIDE_EINVAL, "tensor %s is given twice", part[i].name);
        covered += part[i].count;
    }
    if (covered == train->layout.params)
        return 0;
    char name[160];
    struct slide_place want;
    for (int t = 0; slide_layout_name(&train->layout, t, name, sizeof name, &want); t++) {
        int i = 0;
        while (i < parts && (place[i].unit != want.unit || place[i].offset != want.offset))
            i++;
        if (i == parts)
            return slide_err_set(err, SLIDE_EINVAL, "tensor %s is missing", name);
    }
    return slide_err_set(err, SLIDE_ESTATE, "tensors cover %llu of %llu parameters",
                         (unsigned long long)covered, (unsigned long long)train->layout.params);
}

/* Moves all pieces in groups, between which signals are answered and progress is told. */
static int move_all(struct mover *m, const char *stage, slide_progress_fn *progress, void *arg,
                    struct slide_err *err)
{
    struct slide_train *train = m->train;
    int64_t group = (int64_t)train->threads * 4;
    uint64_t done = 0, total = 0;
    for (int64_t i = 0; i < m->pieces; i++)
        total += m->piece[i].count * slide_dtype_size(m->part[m->piece[i].part].dtype);
    for (m->base = 0; m->base < m->pieces; m->base += group) {
        int64_t n = m->pieces - m->base < group ? m->pieces - m->base : group;
        if (slide_fault(stage, train->spec.rank, err))
            return -1;
        slide_pool_for(train->pool, n, move_piece, m);
        if (m->err.code) {
            *err = m->err;
            return -1;
        }
        for (int64_t i = m->base; i < m->base + n; i++)
            done += m->piece[i].count * slide_dtype_size(m->part[m->piece[i].part].dtype);
        if (progress && progress(arg, done, total, err))
            return -1;
        const struct slide_waiter *local = &train->host.local;
        if (slide_word_get(local->abort) || (local->poll && local->poll(local->arg, err)))
            return slide_err_set(err, SLIDE_EPEER, "another rank has failed");
    }
    return 0;
}

static int move_parts(struct slide_train *train, const struct slide_part *part, int parts, bool out,
                      slide_progress_fn *progress, void *arg, struct slide_err *err)
{
    const char *stage = out ? "save" : "load";
    struct mover m = {
        .train = train, .part = part, .move = out ? move_out : move_in, .err = SLIDE_ERR_INIT};
    struct slide_place *place = slide_mem_array((uint64_t)parts, sizeof *place, err);
    int failed = -1;
    pthread_mutex_init(&m.lock, NULL);
    if (!place || find_places(train, part, parts, place, err))
        goto out;
    m.pieces = cut(train, part, parts, place, NULL);
    m.piece = slide_mem_array((uint64_t)m.pieces, sizeof *m.piece, err);
    m.raw = slide_mem_array((uint64_t)train->threads, (size_t)PIECE * 4, err);
    m.wide = slide_mem_array((uint64_t)train->threads, (size_t)PIECE * sizeof *m.wide, err);
    if (!m.piece || !m.raw || !m.wide)
        goto out;
    cut(train, part, parts, place, m.piece);
    if (move_all(&m, stage, progress, arg, err)) {
        slide_err_note(err, out ? "while saving" : "while loading");
        goto out;
    }
    failed = 0;
out:
    slide_mem_free(m.wide);
    slide_mem_free(m.raw);
    slide_mem_free(m.piece);
    slide_mem_free(place);
    pthread_mutex_destroy(&m.lock);
    return failed;
}

int slide_train_load(struct slide_train *train, const struct slide_part *part, int parts,
                     slide_progress_fn *progress, void *arg, struct slide_err *err)
{
    if (train->failed || train->loaded)
        return slide_err_set(err, SLIDE_ESTATE, "weights are loaded once, before the first step");
    if (move_parts(train, part, parts, false, progress, arg, err) ||
        slide_host_gather(&train->host, "load", NULL, 0, NULL, err))
        return slide_train_fail(train, true, err);
    train->loaded = true;
    return 0;
}

int slide_train_store(struct slide_train *train, const struct slide_part *part, int parts,
                      slide_progress_fn *progress, void *arg, struct slide_err *err)
{
    if (train->failed || !train->loaded)
        return slide_err_set(err, SLIDE_ESTATE, "there is no whole state to save");
    /* Only this rank's slices are read. */
    if (train->updates && slide_updates_drain(train->updates, err))
        return slide_train_fail(train, true, err);
    /* A disk that is full must not cost the run: the ranks tell each other, and all of them return
     * with the state whole and at the same place. */
    double own = move_parts(train, part, parts, true, progress, arg, err) ? 1 : 0;
    double all[SLIDE_RANKS_MAX];
    struct slide_err met = SLIDE_ERR_INIT;
    if (slide_host_gather(&train->host, "the writing of a save", &own, 1, all, &met)) {
        if (!err->code)
            *err = met;
        return slide_train_fail(train, true, err);
    }
    for (int r = 0; r < train->spec.world; r++)
        if (all[r] != 0)
            return slide_err_set(err, SLIDE_EPEER, "rank %d could not save", r);
    return 0;
}

/* ---- fresh weights ---- */

struct filler {
    struct slide_train *train;
    struct slide_place place;
    uint64_t from, to, seed; /* elements of the unit */
    double std;
    float constant;
    bool normal;
};

static uint64_t scramble(uint64_t x)
{
    x += 0x9e3779b97f4a7c15ull; /* splitmix64 */
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ x >> 27) * 0x94d049bb133111ebull;
    return x ^ x >> 31;
}

static void fill_piece(void *ctx, int64_t i, int worker)
{
    (void)worker;
    const struct filler *f = ctx;
    uint64_t at = f->from + (uint64_t)i * 4096, n = f->to - at < 4096 ? f->to - at : 4096;
    float block[4096];
    for (uint64_t k = 0; k < n; k++) {
        /* Box and Muller on a counter: a value depends on seed and place alone. */
        uint64_t key = scramble(f->seed ^ scramble(((uint64_t)f->place.unit << 44) ^ (at + k)));
        double u = ((double)(key >> 40) + 1) / 16777217.0;
        double w = (double)(key & 0xffffffu) / 16777216.0;
        block[k] = f->normal ? (float)(f->std * sqrt(-2 * log(u)) * cos(6.283185307179586 * w))
                             : f->constant;
    }
    put_master(f->train, f->place.unit, at, block, n);
}

int slide_train_init(struct slide_train *train, uint64_t seed, double std, struct slide_err *err)
{
    char name[160];
    struct slide_place place;
    if (train->failed || train->loaded)
        return slide_err_set(err, SLIDE_ESTATE, "weights are set once, before the first step");
    for (int t = 0; slide_layout_name(&train->layout, t, name, sizeof name, &place); t++) {
        uint64_t first, end, from = place.offset, to = place.offset + place.count;
        slide_layout_slice(&train->layout, place.unit, train->spec.rank, &first, &end);
        from = from > first ? from : first;
        to = to < end ? to : end;
        size_t length = strlen(name);
        bool bias = length > 5 && !strcmp(name + length - 5, ".bias");
        struct filler f = {.train = train,
                           .place = place,
                           .from = from,
                           .to = to,
                           .seed = seed,
                           .std = std,
                           .constant = bias ? 0.0f : 1.0f,
                           .normal = place.decay};
        if (from < to)
            slide_pool_for(train->pool, (int64_t)((to - from + 4095) / 4096), fill_piece, &f);
        if (train->host.poll && train->host.poll(train->host.poll_arg, err))
            return slide_train_fail(train, true, err);
    }
    if (slide_host_gather(&train->host, "init", NULL, 0, NULL, err))
        return slide_train_fail(train, true, err);
    train->loaded = true;
    return 0;
}

/* ---- reading ---- */

int slide_train_find(struct slide_train *train, const char *name, struct slide_place *place,
                     struct slide_err *err)
{
    if (slide_layout_find(&train->layout, name, place))
        return slide_err_set(err, SLIDE_EINVAL, "the model has no tensor %s", name);
    return 0;
}

int slide_train_name(struct slide_train *train, int i, char *name, size_t size,
                     struct slide_place *place)
{
    return slide_layout_name(&train->layout, i, name, size, place);
}

int slide_train_tensor(struct slide_train *train, const char *name, const char *what, float *out,
                       struct slide_err *err)
{
    static const struct {
        const char *name;
        enum slide_plane plane;
    } planes[] = {{"master", SLIDE_PLANE_HI},
                  {"exp_avg", SLIDE_PLANE_M},
                  {"exp_avg_sq", SLIDE_PLANE_V},
                  {"grad", SLIDE_PLANE_GRAD}};
    struct slide_place place;
    int i = 0;
    if (slide_train_find(train, name, &place, err))
        return -1;
    while (i < 4 && strcmp(planes[i].name, what))
        i++;
    if (i == 4)
        return slide_err_set(err, SLIDE_EINVAL,
                             "'%s': a tensor has master, exp_avg, exp_avg_sq and grad", what);
    if (planes[i].plane == SLIDE_PLANE_GRAD) {
        if (!train->spec.keep_gradients)
            return slide_err_set(err, SLIDE_EINVAL,
                                 "gradients are kept with keep_gradients=True only");
        enum slide_dtype dtype = train->layout.grad_bytes == 2 ? SLIDE_BF16 : SLIDE_F32;
        slide_vec_convert(train->isa, out, SLIDE_F32,
                          plane_at(train, place.unit, SLIDE_PLANE_GRAD, place.offset), dtype,
                          place.count);
        return 0;
    }
    if (slide_host_wait_updates(&train->host, place.unit, (uint32_t)train->step, &train->host.peers,
                                err))
        return slide_train_fail(train, true, err);
    if (planes[i].plane == SLIDE_PLANE_HI)
        get_master(train, place.unit, place.offset, out, place.count);
    else
        memcpy(out, plane_at(train, place.unit, planes[i].plane, place.offset),
               place.count * sizeof *out);
    return 0;
}
