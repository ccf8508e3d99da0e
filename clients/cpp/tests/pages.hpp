// The pages of a pool's memory, as the driven worker writes and reads them: a token's stamp is one float32 in all
// planes, layers, heads and elements, as in tests/integration/client_worker.py.
#pragma once

#include <kvharbor/harbor.hpp>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>

namespace pages {

// Device memory is that of the stub of the driver, whose addresses are the process's own.
inline float* to_write(const kvharbor::Memory& memory, const std::string& plane, int layer, std::int64_t block) {
  if (memory.on_device()) return reinterpret_cast<float*>(memory.address(plane, layer, block));
  return reinterpret_cast<float*>(memory.mutable_page(plane, layer, block));
}

inline const float* to_read(const kvharbor::Memory& memory, const std::string& plane, int layer, std::int64_t block) {
  if (memory.on_device()) return reinterpret_cast<const float*>(memory.address(plane, layer, block));
  return reinterpret_cast<const float*>(memory.page(plane, layer, block));
}

// The elements of a token in a plane and layer.
struct Run {
  std::string plane;
  int layer;
  std::int64_t block;
  std::size_t first;
  std::size_t count;
};

template <class Use>
void for_each_run(const kvharbor::Memory& memory, const kvharbor::Sequence& sequence, std::int64_t position, Use use) {
  const kvharbor::Layout& layout = memory.descriptor().layout;
  const std::uint32_t block = sequence.block_ids().at(static_cast<std::size_t>(position / layout.block_tokens));
  for (const kvharbor::Plane& plane : layout.planes) {
    const auto count = static_cast<std::size_t>(plane.head_count * plane.head_dim);
    const auto first = static_cast<std::size_t>(position % layout.block_tokens) * count;
    for (int layer = 0; layer < plane.layer_count; ++layer) use(Run{plane.name, layer, block, first, count});
  }
}

inline void stamp(const kvharbor::Memory& memory, const kvharbor::Sequence& sequence, std::int64_t position,
                  float value) {
  for_each_run(memory, sequence, position, [&](const Run& run) {
    std::fill_n(to_write(memory, run.plane, run.layer, run.block) + run.first, run.count, value);
  });
}

// Nothing where its elements differ.
inline std::optional<float> stamp_of(const kvharbor::Memory& memory, const kvharbor::Sequence& sequence,
                                     std::int64_t position) {
  std::optional<float> stamp;
  bool same = true;
  for_each_run(memory, sequence, position, [&](const Run& run) {
    const float* found = to_read(memory, run.plane, run.layer, run.block) + run.first;
    if (!stamp) stamp = *found;
    same = same && std::all_of(found, found + run.count, [&](float each) { return each == *stamp; });
  });
  return same ? stamp : std::nullopt;
}

}  // namespace pages
