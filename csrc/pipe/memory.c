/* The memory plan of a rank. `place` walks all buffers in one order and is run twice: first without
 * memory, to learn the size of everything by name; then with it, to set the pointers. So the plan
 * that is printed and the memory that is used can't differ.
 *
 * Gradients of a block's values share memory by lifetime: a value's gradient lives in backward from
 * the op that reads the value to the op that made it. Values on the residual stream share one
 * buffer, micro.dx: the gradient of a sum is the gradient of its terms. */
#include "pipe/memory.h"

#include <stdio.h>
#include <string.h>

#include "base/mem.h"
#include "base/shm.h"

#define ALIGN 256u

struct arena {
    unsigned char *base; /* NULL in the first walk */
    size_t used;
    struct slide_memory *memory; /* books; NULL: nothing is booked */
};

/* Takes bytes and books them under `name`. */
static void *take(struct arena *arena, const char *name, size_t bytes)
{
    struct slide_memory *memory = arena->memory;
    size_t padded = (bytes + ALIGN - 1) / ALIGN * ALIGN;
    void *at = arena->base ? arena->base + arena->used : NULL;
    arena->used += padded;
    if (arena->base || !memory)
        return at; /* booked in the first walk */
    int i = 0;
    while (i < memory->areas && strcmp(memory->area[i].name, name))
        i++;
    if (i == memory->areas && i < SLIDE_AREAS_MAX)
        memory->area[memory->areas++].name = name;
    if (i < SLIDE_AREAS_MAX)
        memory->area[i].bytes += padded;
    return at;
}

static uint64_t max_u64(uint64_t a, uint64_t b)
{
    return a > b ? a : b;
}

/* ---- gradients of values: aliases and lifetimes ---- */

struct life {
    int root[SLIDE_VALUES_MAX];
    int made[SLIDE_VALUES_MAX], read[SLIDE_VALUES_MAX]; /* by root: first op, last op */
    size_t bytes[SLIDE_VALUES_MAX], at[SLIDE_VALUES_MAX];
};

static int root_of(const struct life *life, int v)
{
    while (life->root[v] != v)
        v = life->root[v];
    return v;
}

/* Joins b's class to a's; value 0 (the unit's input) always stays a root. */
static void join(struct life *life, int a, int b)
{
    int x = root_of(life, a), y = root_of(life, b);
    life->root[x > y ? x : y] = x > y ? y : x;
}

/* Offsets of the block's value gradients; returns the bytes of all. */
static size_t plan_gradients(struct slide_memory *memory, struct life *life)
{
    const struct slide_model *model = memory->o.layout->model;
    const struct slide_unit_table *table = &model->family->unit[SLIDE_UNIT_BLOCK];
    size_t act = slide_dtype_size(slide_layout_weight_type(memory->o.layout));
    for (int v = 0; v < table->values; v++) {
        life->root[v] = v;
        life->made[v] = table->ops;
        life->read[v] = -1;
        life->bytes[v] = 0;
    }
    for (int i = 0; i < table->ops; i++) {
        const struct slide_op *op = &table->op[i];
        if (op->res != SLIDE_NO_VALUE)
            join(life, op->out, op->res);
        if (op->kind == SLIDE_OP_QKNORM)
            join(life, op->out, op->in); /* v passes; q and k are normed backward in place */
    }
    for (int i = 0; i < table->ops; i++) {
        int out = root_of(life, table->op[i].out), in = root_of(life, table->op[i].in);
        if (life->made[out] > i)
            life->made[out] = i;
        life->read[in] = i > life->read[in] ? i : life->read[in];
        life->read[out] = i > life->read[out] ? i : life->read[out];
    }
    int stream = root_of(life, 0);
    size_t end = 0;
    for (int v = 0; v < table->values; v++) {
        memory->gradient_root[v] = root_of(life, v);
        size_t bytes =
            (size_t)memory->o.tokens * act * (size_t)slide_model_dim(model, table->value[v].width);
        int r = root_of(life, v);
        life->bytes[r] = (bytes + ALIGN - 1) / ALIGN * ALIGN;
    }
    /* First fit, in the order of the values; few enough for the square of their number. */
    for (int v = 0; v < table->values; v++) {
        if (life->root[v] != v || v == stream)
            continue;
        size_t at = 0;
        for (int again = 1; again;) {
            again = 0;
            for (int w = 0; w < v; w++) {
                bool both = life->root[w] == w && w != stream && life->made[w] <= life->read[v] &&
                            life->made[v] <= life->read[w];
                if (both && at < life->at[w] + life->bytes[w] &&
                    life->at[w] < at + life->bytes[v]) {
                    at = life->at[w] + life->bytes[w];
                    again = 1;
                }
            }
        }
        life->at[v] = at;
        end = at + life->bytes[v] > end ? at + life->bytes[v] : end;
    }
    return end;
}

/* ---- the walk ---- */

/* Slots have the same places on all ranks: nothing of a rank's batches shows in them. */
static void place_slots(struct slide_memory *memory, struct arena *arena)
{
    const struct slide_layout *layout = memory->o.layout;
    size_t size = slide_dtype_size(slide_layout_weight_type(layout));
    bool tied = layout->model->config.tied;
    int last = layout->units - 1;
    uint64_t block = 0, head = layout->unit[last].count;
    for (int u = 1; u < last; u++)
        block = max_u64(block, layout->unit[u].count);
    uint64_t edge = max_u64(layout->unit[0].count, tied ? 0 : head);
    for (int i = 0; i < memory->o.slots + 2; i++) {
        uint64_t count = i < memory->o.slots    ? block
                         : i == memory->o.slots ? edge
                         : tied                 ? head
                                                : 0;
        void *at = take(arena, "weight slots", count * size);
        if (memory->weights)
            memory->weights[i] = at;
    }
    for (int i = 0; i < memory->o.grads + 2; i++) {
        uint64_t count = i < memory->o.grads    ? block
                         : i == memory->o.grads ? edge
                         : tied                 ? head
                                                : 0;
        void *grad = take(arena, "gradient slots", count * 4), *wire = grad;
        if (memory->o.wire != SLIDE_F32)
            wire = take(arena, "gradient slots", count * 2);
        if (memory->weights) {
            memory->grad_count[i] = count;
            memory->grad[i] = grad;
            memory->wire[i] = wire;
        }
    }
    memory->sums = memory->o.sums_bytes ? take(arena, "gradient sums", memory->o.sums_bytes) : NULL;
}

size_t slide_memory_slots_bytes(const struct slide_memory_options *options)
{
    struct slide_memory memory = {.o = *options};
    struct arena arena = {0};
    place_slots(&memory, &arena);
    return arena.used;
}

static void place_micro(struct slide_memory *memory, struct arena *arena, int m, size_t act)
{
    const struct slide_model *model = memory->o.layout->model;
    struct slide_micro *micro = &memory->micro[m];
    size_t n = (size_t)memory->o.tokens, hidden = (size_t)model->config.hidden;
    size_t half = (size_t)model->config.head_dim / 2;
    int32_t **array[] = {&micro->ids, &micro->labels, &micro->positions, &micro->first[0],
                         &micro->first[1]};
    for (int i = 0; i < 5; i++)
        *array[i] = take(arena, "inputs", n * 4);
    micro->cos = take(arena, "inputs", n * half * 4);
    micro->sin = take(arena, "inputs", n * half * 4);
    micro->loss = take(arena, "inputs", n * 4);
    void *ring[SLIDE_RING] = {NULL};
    int number = 0;
    for (int i = 0; memory->saved_bytes && i < SLIDE_RING; i++)
        ring[i] = take(arena, "boundary activations", n * hidden * act);
    for (int u = 0; u < model->units - 1; u++)
        micro->boundary[u] = memory->offload[u]
                                 ? ring[number++ % SLIDE_RING]
                                 : take(arena, "boundary activations", n * hidden * act);
    micro->dx = take(arena, "value gradients", n * hidden * act);
}

/* A value that stays has memory of its own in each block and micro-batch; all others of its kind
 * share one piece, for one block of one micro-batch is computed at a time. */
static void place_values(struct slide_memory *memory, struct arena *arena, size_t act)
{
    const struct slide_model *model = memory->o.layout->model;
    const struct slide_unit_table *table = &model->family->unit[SLIDE_UNIT_BLOCK];
    struct slide_values shared = {0};
    size_t n = (size_t)memory->o.tokens;
    int blocks = model->units - 2, micro = memory->o.micro_batches;
    for (int v = 2; v < table->values; v++) { /* 0 and 1 are the boundary */
        size_t bytes = n * act * (size_t)slide_model_dim(model, table->value[v].width);
        bool any = false;
        for (int s = 0; s < blocks * micro; s++) {
            enum slide_activations policy = memory->o.activations[s / micro + 1];
            bool stays = slide_value_stays(model, s / micro + 1, v, policy);
            any |= !stays;
            if (stays)
                memory->values[s].value[v] = take(arena, "unit activations", bytes);
        }
        shared.value[v] = any ? take(arena, "unit activations", bytes) : NULL;
    }
    for (int i = 0; i < table->ops; i++) {
        size_t bytes = n * (size_t)slide_op_aux(model, &table->op[i]) * 4;
        bool any = false;
        for (int s = 0; bytes && s < blocks * micro; s++) {
            enum slide_activations policy = memory->o.activations[s / micro + 1];
            bool stays = slide_value_stays(model, s / micro + 1, table->op[i].out, policy);
            any |= !stays;
            if (stays)
                memory->values[s].aux[i] = take(arena, "unit activations", bytes);
        }
        shared.aux[i] = any ? take(arena, "unit activations", bytes) : NULL;
    }
    for (int s = 0; s < blocks * micro; s++) {
        for (int v = 2; v < table->values; v++)
            if (!memory->values[s].value[v])
                memory->values[s].value[v] = shared.value[v];
        for (int i = 0; i < table->ops; i++)
            if (!memory->values[s].aux[i])
                memory->values[s].aux[i] = shared.aux[i];
    }
}

static void place(struct slide_memory *memory, struct arena *arena)
{
    const struct slide_layout *layout = memory->o.layout;
    const struct slide_model *model = layout->model;
    const struct slide_config *config = &model->config;
    size_t n = (size_t)memory->o.tokens, rows = (size_t)memory->o.head_rows;
    size_t act = slide_dtype_size(slide_layout_weight_type(layout));
    for (int m = 0; m < memory->o.micro_batches; m++)
        place_micro(memory, arena, m, act);
    place_values(memory, arena, act);
    struct life life;
    unsigned char *base = take(arena, "value gradients", plan_gradients(memory, &life));
    for (int v = 0; v < model->family->unit[SLIDE_UNIT_BLOCK].values; v++) {
        int r = memory->gradient_root[v];
        memory->gradient[v] = r == memory->gradient_root[0] || !base ? NULL : base + life.at[r];
    }
    memory->inv_freq = take(arena, "inputs", (size_t)config->head_dim / 2 * 4);
    memory->logits = take(arena, "logits chunk", rows * (size_t)config->vocab * act);
    memory->head = take(arena, "logits chunk", rows * (size_t)config->hidden * act);
    memory->dhead = take(arena, "logits chunk", rows * (size_t)config->hidden * act);
    memory->head_rstd = take(arena, "logits chunk", rows * 4);
    memory->logits_f32 =
        act == 4 ? NULL : take(arena, "logits chunk", rows * (size_t)config->vocab * 4);
    size_t wide = (size_t)slide_model_dim(model, SLIDE_DIM_QKV);
    wide = wide > (size_t)slide_model_dim(model, SLIDE_DIM_INTER2)
               ? wide
               : (size_t)slide_model_dim(model, SLIDE_DIM_INTER2);
    wide = wide > (size_t)config->hidden ? wide : (size_t)config->hidden;
    /* Biases are as wide as the widest product, norms as a token or a head. */
    size_t normed = (size_t)(config->hidden > config->head_dim ? config->hidden : config->head_dim);
    size_t norms = (n + SLIDE_NORM_BLOCK - 1) / SLIDE_NORM_BLOCK * normed;
    size_t biases = (n + SLIDE_BIAS_BLOCK - 1) / SLIDE_BIAS_BLOCK * wide;
    memory->norm_scratch = take(arena, "workspace", (norms > biases ? norms : biases) * 4);
    memory->attn_workspace = take(arena, "workspace", memory->attn_bytes);
    memory->found = take(arena, "workspace", 4);
    memory->gemm_workspace = take(arena, "workspace", memory->gemm_bytes);
}

/* What the device wants for its attention: asked for once, for it may build plans on the way. The
 * widest row that a micro-batch of so many tokens may have bounds it. */
static void ask_workspace(struct slide_memory *memory)
{
    const struct slide_layout *layout = memory->o.layout;
    const struct slide_config *config = &layout->model->config;
    int64_t rows = (memory->o.tokens + memory->o.seq - 1) / memory->o.seq;
    struct slide_attn attn = {.dtype = slide_layout_weight_type(layout),
                              .seq = memory->o.seq,
                              .rows = (int32_t)rows,
                              .heads = config->heads,
                              .kv_heads = config->kv_heads,
                              .head_dim = config->head_dim};
    memory->gemm_bytes = slide_gemm_workspace(memory->o.device);
    memory->attn_bytes = slide_attn_workspace(memory->o.device, &attn);
    if (config->sliding_window > 0) {
        attn.window = config->sliding_window;
        size_t bytes = slide_attn_workspace(memory->o.device, &attn);
        memory->attn_bytes = bytes > memory->attn_bytes ? bytes : memory->attn_bytes;
    }
}

/* ---- outputs in host memory ---- */

/* Which units' outputs wait there: the inputs of blocks whose policy says so, but for the last
 * SLIDE_RING of them, which the backward reads first. */
static int plan_saved(struct slide_memory *memory, struct slide_err *err)
{
    const struct slide_model *model = memory->o.layout->model;
    size_t act = slide_dtype_size(slide_layout_weight_type(memory->o.layout));
    size_t bytes = (size_t)memory->o.tokens * (size_t)model->config.hidden * act;
    bytes = (bytes + ALIGN - 1) / ALIGN * ALIGN;
    int count = 0;
    for (int u = 1; u < model->units - 1; u++)
        count += memory->o.activations[u] == SLIDE_ACT_OFFLOAD;
    if (count <= SLIDE_RING)
        return 0; /* they would never leave the ring */
    for (int u = 0; u < model->units - 2; u++)
        memory->offload[u] = memory->o.activations[u + 1] == SLIDE_ACT_OFFLOAD;
    uint64_t all;
    if (__builtin_mul_overflow((uint64_t)bytes, (uint64_t)(count - SLIDE_RING), &all) ||
        __builtin_mul_overflow(all, (uint64_t)memory->o.micro_batches, &all) || all > SIZE_MAX)
        return slide_err_set(err, SLIDE_EMEM, "host: activations of %d blocks x %d micro-batches",
                             count, memory->o.micro_batches);
    memory->saved_bytes = (size_t)all;
    return 0;
}

static int take_saved(struct slide_memory *memory, struct slide_err *err)
{
    const struct slide_model *model = memory->o.layout->model;
    uint64_t room;
    char source[256];
    if (!memory->saved_bytes)
        return 0;
    slide_shm_room(&room, source, sizeof source);
    if (memory->saved_bytes > room)
        return slide_err_set(err, SLIDE_EMEM,
                             "host: %zu bytes are wanted for activations='offload', %llu are free "
                             "(%s)",
                             memory->saved_bytes, (unsigned long long)room, source);
    memory->saved_base = slide_mem_map(memory->saved_bytes, err);
    if (!memory->saved_base)
        return -1;
    /* Unpinned memory works too, the driver then copies in between: see train/pins.c. */
    memory->saved_pinned =
        !slide_device_pin(memory->o.device, memory->saved_base, memory->saved_bytes, NULL);
    unsigned char *at = memory->saved_base;
    size_t piece = 0;
    int count = 0;
    for (int u = 0; u < model->units; u++)
        count += memory->offload[u];
    piece = memory->saved_bytes / (size_t)(count - SLIDE_RING) / (size_t)memory->o.micro_batches;
    for (int u = 0, number = 0; u < model->units; u++) {
        if (!memory->offload[u] || number++ >= count - SLIDE_RING)
            continue;
        for (int m = 0; m < memory->o.micro_batches; m++, at += piece)
            memory->micro[m].saved[u] = at;
    }
    return 0;
}

/* Refuses a plan that can't fit, by name and size, and says what would make it smaller. */
static int check_budget(const struct slide_memory *memory, struct slide_err *err)
{
    struct slide_device_info info;
    if (slide_device_info(memory->o.device, &info, err))
        return -1;
    bool own = memory->o.budget != 0;
    uint64_t limit = own ? memory->o.budget : info.free_bytes;
    if (memory->bytes - (memory->o.slots_given && !own ? memory->slots_bytes : 0) <= limit)
        return 0;
    char list[600] = "";
    for (int i = 0; i < memory->areas; i++) {
        size_t used = strlen(list);
        snprintf(list + used, sizeof list - used, "%s%s %.2f", i ? ", " : "", memory->area[i].name,
                 (double)memory->area[i].bytes / (1u << 30));
    }
    return slide_err_set(
        err, SLIDE_EMEM,
        "%s: the plan takes %zu bytes, %s %llu. In GiB: %s. activations='offload', "
        "fewer slots, a smaller per_device_train_batch_size with more "
        "gradient_accumulation_steps, or a smaller head_rows take less",
        info.name, memory->bytes, own ? "gpu_memory_budget is" : "its free memory is",
        (unsigned long long)limit, list);
}

int slide_memory_init(struct slide_memory *memory, const struct slide_memory_options *options,
                      struct slide_err *err)
{
    *memory = (struct slide_memory){.o = *options,
                                    .slots_base = options->slots_at,
                                    .slots_own = !options->slots_at || options->slots_given};
    const struct slide_model *model = options->layout->model;
    int units = model->units, micro = options->micro_batches;
    memory->weights = slide_mem_array((uint64_t)options->slots + 2, sizeof *memory->weights, err);
    memory->grad = slide_mem_array((uint64_t)options->grads + 2, sizeof *memory->grad, err);
    memory->wire = slide_mem_array((uint64_t)options->grads + 2, sizeof *memory->wire, err);
    memory->grad_count =
        slide_mem_array((uint64_t)options->grads + 2, sizeof *memory->grad_count, err);
    memory->micro = slide_mem_array((uint64_t)micro, sizeof *memory->micro, err);
    memory->values =
        slide_mem_array((uint64_t)(units - 2) * (uint64_t)micro, sizeof *memory->values, err);
    memory->offload = slide_mem_array((uint64_t)units, 1, err);
    if (!memory->weights || !memory->grad || !memory->wire || !memory->grad_count ||
        !memory->micro || !memory->values || !memory->offload)
        goto fail;
    for (int m = 0; m < micro; m++) {
        memory->micro[m].boundary = slide_mem_array((uint64_t)units, sizeof(void *), err);
        memory->micro[m].saved = slide_mem_array((uint64_t)units, sizeof(void *), err);
        if (!memory->micro[m].boundary || !memory->micro[m].saved)
            goto fail;
    }
    if (plan_saved(memory, err))
        goto fail;
    ask_workspace(memory);
    struct arena slots = {.memory = memory}, plan = {.memory = memory};
    place_slots(memory, &slots);
    place(memory, &plan);
    memory->slots_bytes = slots.used;
    memory->bytes = slots.used + plan.used;
    if (check_budget(memory, err))
        goto fail;
    if (!memory->slots_base)
        memory->slots_base = slide_device_alloc(options->device, slots.used, err);
    memory->base = memory->slots_base ? slide_device_alloc(options->device, plan.used, err) : NULL;
    if (!memory->base)
        goto fail;
    struct arena real_slots = {.memory = memory, .base = memory->slots_base};
    place_slots(memory, &real_slots);
    struct arena real = {.memory = memory, .base = memory->base};
    place(memory, &real);
    if (take_saved(memory, err))
        goto fail;

    size_t tokens = (size_t)options->tokens;
    memory->host_bytes = tokens * 6 * 4 * (size_t)micro;
    /* The RoPE frequencies pass through here once. */
    size_t freq = (size_t)model->config.head_dim / 2 * 4;
    if (memory->host_bytes < freq)
        memory->host_bytes = freq;
    size_t found = (memory->host_bytes + 63) / 64 * 64;
    memory->host_bytes = found + 64;
    memory->host_base = slide_mem_pages(memory->host_bytes, err);
    if (!memory->host_base ||
        slide_device_pin(options->device, memory->host_base, memory->host_bytes, err))
        goto fail;
    memory->host_pinned = true;
    memory->host_found = (int32_t *)((unsigned char *)memory->host_base + found);
    for (int m = 0; m < micro; m++) {
        memory->micro[m].host = (int32_t *)memory->host_base + (size_t)m * 6 * tokens;
        memory->micro[m].host_loss = (float *)(memory->micro[m].host + 5 * tokens);
    }
    return 0;
fail:
    slide_err_note(err, "while planning device memory");
    slide_memory_fini(memory);
    return -1;
}

void slide_memory_fini(struct slide_memory *memory)
{
    if (memory->saved_pinned)
        slide_device_unpin(memory->o.device, memory->saved_base, memory->saved_bytes);
    slide_mem_unmap(memory->saved_base, memory->saved_bytes);
    slide_mem_free(memory->offload);
    if (memory->host_pinned)
        slide_device_unpin(memory->o.device, memory->host_base, memory->host_bytes);
    slide_mem_free(memory->host_base);
    if (memory->base)
        slide_device_free(memory->o.device, memory->base);
    if (memory->slots_own)
        slide_device_free(memory->o.device, memory->slots_base);
    for (int m = 0; memory->micro && m < memory->o.micro_batches; m++) {
        slide_mem_free(memory->micro[m].boundary);
        slide_mem_free(memory->micro[m].saved);
    }
    slide_mem_free(memory->values);
    slide_mem_free(memory->micro);
    slide_mem_free(memory->grad_count);
    slide_mem_free(memory->wire);
    slide_mem_free(memory->grad);
    slide_mem_free(memory->weights);
    *memory = (struct slide_memory){0};
}

struct slide_values *slide_memory_values(struct slide_memory *memory, int unit, int micro)
{
    return &memory->values[(unit - 1) * memory->o.micro_batches + micro];
}
