#include "descriptors.hpp"

#include <optional>

#include "raising.hpp"

namespace kvharbor::detail {
namespace {

// The user half of a 48-bit address space: sums of two numbers below it do not overflow.
constexpr std::int64_t kMaxBytes = std::int64_t{1} << 47;
constexpr std::int64_t kMaxCount = std::int64_t{1} << 31;

[[noreturn]] void refuse(const v1::PoolDescriptor& message, const std::string& cause) {
  throw ServiceBug({"", "the service described pool " + message.name() + " with " + cause, {}});
}

// Returns count * stride if it is a size that memory can have.
std::optional<std::int64_t> product(std::int64_t count, std::int64_t stride) {
  if (count < 0 || stride < 0 || stride > kMaxBytes) return std::nullopt;
  if (stride != 0 && count > kMaxBytes / stride) return std::nullopt;
  return count * stride;
}

void check_span(const v1::PoolDescriptor& message, const v1::Plane& plane, const v1::PlaneSpan& span) {
  const auto layers = product(std::int64_t{plane.layer_count()} - 1, span.layer_stride_bytes());
  const auto blocks = product(message.block_count() - 1, span.block_stride_bytes());
  const bool bounded = layers && blocks && span.offset_bytes() >= 0 && span.offset_bytes() <= kMaxBytes &&
                       plane.page_bytes() > 0 && plane.page_bytes() <= kMaxBytes;
  if (span.name() != plane.name() || !bounded ||
      span.offset_bytes() + *layers + *blocks + plane.page_bytes() > message.size_bytes()) {
    refuse(message, "a page of plane " + plane.name() + " outside of its memory");
  }
}

Plane plane_of(const v1::Plane& message) {
  Plane plane;
  plane.name = message.name();
  plane.layer_count = message.layer_count();
  plane.data_type = static_cast<DataType>(message.data_type());
  plane.page_bytes = message.page_bytes();
  plane.interior = message.interior();
  plane.head_count = message.head_count();
  plane.head_dim = message.head_dim();
  return plane;
}

Layout layout_of(const v1::Layout& message) {
  Layout layout;
  layout.model = message.model();
  layout.block_tokens = message.block_tokens();
  layout.order = static_cast<BlockOrder>(message.order());
  layout.tp_size = message.tp_size();
  layout.scratch_block_count = message.scratch_block_count();
  for (const v1::Plane& plane : message.planes()) layout.planes.push_back(plane_of(plane));
  return layout;
}

}  // namespace

v1::Layout message_of(const Layout& layout) {
  v1::Layout message;
  message.set_model(layout.model);
  message.set_tp_size(layout.tp_size);
  message.set_block_tokens(layout.block_tokens);
  message.set_scratch_block_count(layout.scratch_block_count);
  message.set_order(static_cast<v1::BlockOrder>(layout.order));
  for (const Plane& plane : layout.planes) {
    v1::Plane& added = *message.add_planes();
    added.set_name(plane.name);
    added.set_layer_count(plane.layer_count);
    added.set_data_type(static_cast<v1::DataType>(plane.data_type));
    added.set_page_bytes(plane.page_bytes);
    added.set_interior(plane.interior);
    added.set_head_count(plane.head_count);
    added.set_head_dim(plane.head_dim);
  }
  return message;
}

Descriptor descriptor_of(const v1::PoolDescriptor& message) {
  if (message.size_bytes() < 1 || message.size_bytes() > kMaxBytes) refuse(message, "an impossible size");
  if (message.block_count() < 1 || message.block_count() > kMaxCount) refuse(message, "an impossible block count");
  if (message.layout().block_tokens() < 1) refuse(message, "blocks of no tokens");
  if (message.spans_size() != message.layout().planes_size()) refuse(message, "other spans than planes");
  Descriptor descriptor;
  descriptor.pool_id = message.pool_id();
  descriptor.name = message.name();
  descriptor.epoch = message.epoch();
  descriptor.arena_kind = message.arena_kind();
  descriptor.layout = layout_of(message.layout());
  descriptor.block_count = message.block_count();
  descriptor.size_bytes = message.size_bytes();
  for (int index = 0; index < message.spans_size(); ++index) {
    const v1::PlaneSpan& span = message.spans(index);
    check_span(message, message.layout().planes(index), span);
    descriptor.spans.push_back(
        {span.name(), span.offset_bytes(), span.layer_stride_bytes(), span.block_stride_bytes()});
  }
  for (const v1::PoolPart& part : message.parts()) descriptor.part_devices.push_back(part.device());
  return descriptor;
}

}  // namespace kvharbor::detail
