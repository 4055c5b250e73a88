// What kernels.cpp, emulate.cpp and fake_cuda.cpp share.
#pragma once

#include <cstddef>

namespace emu {

struct entry {
    const char *name;
    void (*run)(const void *args);
    size_t bytes; // of args
};
extern const entry entries[]; // ends with an empty one

// Runs fn(args) in every thread of every block, blocks in order. grid and block: x, y, z.
void launch(const unsigned *grid, const unsigned *block, size_t shared,
            void (*fn)(const void *args), const void *args);

} // namespace emu
