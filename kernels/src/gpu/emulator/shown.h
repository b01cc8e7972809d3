// The memory that blocks of a launch see of each other in the emulator.
#pragma once

#include <string.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "simt.h"

namespace {

using simt::Grid;

// What the blocks of a launch see of each other: memory as it was before the launch, and what was
// shown since.
struct Shown {
    std::vector<simt::Range> ranges;
    std::vector<std::vector<unsigned char>> bytes;  // of each range
    std::vector<std::pair<unsigned char*, unsigned char>> hidden;

    // Watches launches that are small enough for a comparison of their memory after each block.
    void begin(const Grid& grid, uint64_t blocks) {
        ranges.clear(), bytes.clear(), hidden.clear();
        uint64_t all = 0;
        for (size_t i = 0; i < grid.memory_count; i++) all += grid.memory[i].bytes;
        if (all * blocks > MOST_COMPARED) return;
        for (size_t i = 0; i < grid.memory_count; i++) {
            const simt::Range& range = grid.memory[i];
            auto same = [&](const simt::Range& other) { return other.start == range.start; };
            if (std::any_of(ranges.begin(), ranges.end(), same)) continue;
            auto* start = static_cast<unsigned char*>(range.start);
            ranges.push_back(range);
            bytes.emplace_back(start, start + range.bytes);
        }
    }
    // Calls `change(now, shown)` with the place of each byte that differs.
    template <class F>
    void each_change(F change) {
        for (size_t i = 0; i < ranges.size(); i++) {
            auto* now = static_cast<unsigned char*>(ranges[i].start);
            for (size_t at = 0; at < ranges[i].bytes; at += CHUNK) {
                size_t end = std::min(at + CHUNK, ranges[i].bytes);
                if (memcmp(now + at, &bytes[i][at], end - at) == 0) continue;
                for (size_t b = at; b < end; b++)
                    if (now[b] != bytes[i][b]) change(now + b, &bytes[i][b]);
            }
        }
    }
    void show_all() {
        each_change([](unsigned char* now, unsigned char* shown) { *shown = *now; });
    }
    void show(const void* written, size_t count) {
        auto* from = static_cast<const unsigned char*>(written);
        for (size_t i = 0; i < ranges.size(); i++) {
            size_t at = from - static_cast<unsigned char*>(ranges[i].start);
            if (at < ranges[i].bytes) memcpy(&bytes[i][at], from, count);
        }
    }
    // After a block: the next ones do not see the rest of what it wrote.
    void hide_rest() {
        each_change([this](unsigned char* now, unsigned char* shown) {
            hidden.push_back({now, *now});
            *now = *shown;
        });
    }
    // After the launch, all is seen.
    void end() {
        for (auto [at, value] : hidden) *at = value;
    }

  private:
    static constexpr uint64_t MOST_COMPARED = 64 << 20;  // bytes of all blocks: some 10 ms
    static constexpr size_t CHUNK = 256;
};

}  // namespace
