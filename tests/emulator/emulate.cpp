// The fibers behind emulate.h. A fiber starts on its own stack by makecontext and changes hands by
// setjmp and longjmp, which save no signal mask and so cost nanoseconds. The scheduler is a ring: a
// fiber that waits passes on to the next one. When a whole round passes and nobody moves, the kernel
// has a barrier that not all of its threads reach.
#include "emulate.h"

#include <csetjmp>
#include <cstdio>
#include <cstdlib>
#include <ucontext.h>
#include <vector>

namespace emu {

static constexpr size_t STACK = 256 * 1024;
static constexpr unsigned THREADS_MAX = 1024;

struct warp {
    unsigned waiting = 0, generation = 0; // of sync_warp
    unsigned char show[2][32][EXCHANGE];
};

struct copy {
    void *to;
    const void *from;
    size_t bytes;
};

struct fiber {
    place at;
    std::vector<copy> copies; // started, not yet waited for
    jmp_buf state;
    ucontext_t start;
    unsigned char *stack = nullptr;
    unsigned index = 0, exchanges = 0;
    bool begun = false, done = false;
};

struct block {
    std::vector<fiber> fibers;
    std::vector<warp> warps;
    unsigned count = 0, live = 0, current = 0;
    unsigned waiting = 0, generation = 0; // of sync_block
    unsigned long moves = 0;              // barriers completed, fibers ended
    unsigned long idle = 0;               // turns since the last of them
    void (*fn)(const void *) = nullptr;
    const void *args = nullptr;
    std::vector<unsigned char> shared;
    ucontext_t main;
    jmp_buf home;
    ~block()
    {
        for (fiber &f : fibers)
            free(f.stack);
    }
};

static thread_local block *running;

place &here()
{
    return running->fibers[running->current].at;
}

unsigned lane()
{
    return running->current % 32;
}

void *shared_memory()
{
    uintptr_t p = (uintptr_t)running->shared.data();
    return (void *)((p + 127) / 128 * 128);
}

static void fiber_main()
{
    block *b = running;
    b->fn(b->args);
    fiber &f = b->fibers[b->current];
    f.done = true;
    b->live--;
    b->idle = 0;
    _longjmp(b->home, 1);
}

// Runs the current fiber until it ends; those that wait pass on among themselves.
__attribute__((noinline)) static void enter(block *b)
{
    fiber &f = b->fibers[b->current];
    if (f.begun)
        _longjmp(f.state, 1);
    f.begun = true;
    getcontext(&f.start);
    f.start.uc_stack.ss_sp = f.stack;
    f.start.uc_stack.ss_size = STACK;
    f.start.uc_link = nullptr;
    makecontext(&f.start, fiber_main, 0);
    setcontext(&f.start);
}

__attribute__((noinline)) static void next(block *b)
{
    do
        b->current = (b->current + 1) % b->count;
    while (b->fibers[b->current].done);
}

__attribute__((noinline)) static void yield()
{
    block *b = running;
    if (++b->idle > 4ul * b->count + 64) {
        fprintf(stderr, "emulator: a barrier that not all threads reach (block %u,%u,%u)\n",
                here().block.x, here().block.y, here().block.z);
        abort();
    }
    fiber &f = b->fibers[b->current];
    if (_setjmp(f.state))
        return;
    next(b);
    enter(b);
}

void sync_block()
{
    block *b = running;
    unsigned generation = b->generation;
    b->waiting++;
    for (;;) {
        if (b->generation != generation)
            return;
        if (b->waiting == b->live) {
            b->waiting = 0;
            b->generation++;
            b->idle = 0;
            return;
        }
        yield();
    }
}

void sync_warp(unsigned mask)
{
    block *b = running;
    unsigned first = b->current / 32 * 32, want = 0;
    for (unsigned i = 0; i < 32 && first + i < b->count; i++)
        want += (mask >> i & 1) && !b->fibers[first + i].done;
    warp &w = b->warps[b->current / 32];
    unsigned generation = w.generation;
    if (++w.waiting >= want) {
        w.waiting = 0;
        w.generation++;
        b->idle = 0;
        return;
    }
    while (w.generation == generation)
        yield();
}

const unsigned char *exchange(unsigned mask, const void *mine, size_t bytes)
{
    block *b = running;
    fiber &f = b->fibers[b->current];
    warp &w = b->warps[b->current / 32];
    if (bytes > EXCHANGE)
        abort();
    unsigned side = f.exchanges++ % 2; // nobody is two exchanges ahead of anybody
    std::memcpy(w.show[side][b->current % 32], mine, bytes);
    sync_warp(mask);
    return &w.show[side][0][0];
}

void copy_later(void *to, const void *from, size_t bytes)
{
    running->fibers[running->current].copies.push_back(copy{to, from, bytes});
}

void copy_now()
{
    std::vector<copy> &copies = running->fibers[running->current].copies;
    for (const copy &c : copies)
        if (c.from)
            std::memcpy(c.to, c.from, c.bytes);
        else
            std::memset(c.to, 0, c.bytes);
    copies.clear();
}

void stop_misaligned(const void *p, size_t bytes)
{
    fprintf(stderr, "emulator: %p is not aligned to %zu bytes\n", p, bytes);
    abort();
}

__attribute__((noinline)) static void run_block(block *b)
{
    if (!_setjmp(b->home)) {
        b->current = 0;
        enter(b);
    }
    // A fiber has ended: the next one that has not.
    if (b->live) {
        next(b);
        enter(b);
    }
}

void launch(const unsigned *g, const unsigned *d, size_t shared, void (*fn)(const void *),
            const void *args)
{
    uint3 grid{g[0], g[1], g[2]}, dim{d[0], d[1], d[2]};
    static thread_local block b;
    unsigned count = dim.x * dim.y * dim.z;
    if (!count || count > THREADS_MAX)
        abort();
    while (b.fibers.size() < count) {
        b.fibers.emplace_back();
        b.fibers.back().stack = (unsigned char *)malloc(STACK);
    }
    b.warps.assign((count + 31) / 32, warp());
    b.shared.assign(shared + 256, 0xa5); // not zero: shared memory starts with anything
    b.fn = fn;
    b.args = args;
    running = &b;
    for (unsigned z = 0; z < grid.z; z++)
        for (unsigned y = 0; y < grid.y; y++)
            for (unsigned x = 0; x < grid.x; x++) {
                for (unsigned i = 0; i < count; i++) {
                    fiber &f = b.fibers[i];
                    f.begun = f.done = false;
                    f.exchanges = 0;
                    f.copies.clear();
                    f.at.thread = uint3{i % dim.x, i / dim.x % dim.y, i / (dim.x * dim.y)};
                    f.at.block = uint3{x, y, z};
                    f.at.block_dim = dim;
                    f.at.grid_dim = grid;
                }
                b.count = b.live = count;
                b.waiting = 0;
                b.idle = 0;
                run_block(&b);
            }
    running = nullptr;
}

} // namespace emu
