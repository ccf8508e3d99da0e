#include "kvharbor/layout.hpp"

#include <algorithm>
#include <utility>

#include "raising.hpp"

namespace kvharbor {

int item_bytes(DataType data_type) {
  switch (data_type) {
    case DataType::kFloat32:
      return 4;
    case DataType::kFloat16:
    case DataType::kBfloat16:
      return 2;
    case DataType::kFloat8E4M3:
    case DataType::kFloat8E5M2:
    case DataType::kUint8:
      return 1;
  }
  detail::raise_invalid("data_type", std::to_string(static_cast<int>(data_type)), "one of DataType", "correct it");
}

Layout Layout::attention(std::string model, int layer_count, int head_count, int head_dim, DataType data_type,
                         int block_tokens) {
  Layout layout;
  layout.model = std::move(model);
  layout.block_tokens = block_tokens;
  for (const char* name : {"k", "v"}) {
    Plane plane;
    plane.name = name;
    plane.layer_count = layer_count;
    plane.data_type = data_type;
    plane.page_bytes = std::int64_t{block_tokens} * head_count * head_dim * item_bytes(data_type);
    plane.head_count = head_count;
    plane.head_dim = head_dim;
    layout.planes.push_back(std::move(plane));
  }
  return layout;
}

std::int64_t Layout::block_bytes() const {
  std::int64_t bytes = 0;
  for (const Plane& plane : planes) bytes += plane.layer_count * plane.page_bytes;
  return bytes;
}

std::int64_t Descriptor::page_offset_bytes(const std::string& plane, int layer, std::int64_t block) const {
  const int layer_count = this->plane(plane).layer_count;
  if (layer < 0 || layer >= layer_count) {
    detail::raise_invalid("layer", std::to_string(layer), "in [0, " + std::to_string(layer_count) + ")",
                          "count the plane's layers from 0");
  }
  if (block < 0 || block >= block_count) {
    detail::raise_invalid("block", std::to_string(block), "in [0, " + std::to_string(block_count) + ")",
                          "take blocks from a table of this pool");
  }
  const auto span = std::find_if(spans.begin(), spans.end(), [&](const PlaneSpan& each) { return each.name == plane; });
  return span->offset_bytes + layer * span->layer_stride_bytes + block * span->block_stride_bytes;
}

const Plane& Descriptor::plane(const std::string& name) const {
  std::string known;
  for (const Plane& plane : layout.planes) {
    if (plane.name == name) return plane;
    known += (known.empty() ? "" : ", ") + plane.name;
  }
  detail::raise_invalid("plane", name, "a plane of the layout", "name one of " + known);
}

}  // namespace kvharbor
