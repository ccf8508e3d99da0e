/// @file
/// What the blocks of a pool look like, and where each page lies.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace kvharbor {

/// Element types of a plane; numbers as in types.proto.
enum class DataType { kFloat32 = 1, kFloat16 = 2, kBfloat16 = 3, kFloat8E4M3 = 4, kFloat8E5M2 = 5, kUint8 = 6 };

/// Bytes of one element.
int item_bytes(DataType data_type);

/// Which of layer and block is the outer axis of the memory; numbers as in types.proto.
enum class BlockOrder {
  kLayerMajor = 1,  ///< `[layer, plane, block, page]`: neighbouring blocks of a layer are contiguous.
  kBlockMajor = 2,  ///< `[block, layer, plane, page]`: a block is one contiguous piece.
};

/// The interior `[token, head, dim]` in C order. Any other tag is an engine's own.
inline constexpr const char* kTokenHeadDim = "token_head_dim";

/// One kind of page that every block has once a layer: K, V, their scales, or a latent vector.
struct Plane {
  std::string name;
  int layer_count = 0;
  DataType data_type = DataType::kFloat32;
  std::int64_t page_bytes = 0;  ///< Of one block and layer; a multiple of 16.
  std::string interior = kTokenHeadDim;
  int head_count = 0;  ///< 0 for an interior of the engine's own.
  int head_dim = 0;    ///< 0 for an interior of the engine's own.
};

/// A pool's fingerprint: two engines share blocks only if all of it is equal. The service checks it (LayoutInvalid).
struct Layout {
  std::string model;      ///< Identity of weights and everything else that changes the numbers.
  int block_tokens = 64;  ///< 16 to 512, in multiples of 16.
  std::vector<Plane> planes;
  BlockOrder order = BlockOrder::kLayerMajor;
  int tp_size = 1;              ///< Tensor-parallel ranks; the pool has as many parts.
  int scratch_block_count = 1;  ///< Leading blocks that are never handed out, for padding writes.

  /// Builds the usual layout: planes "k" and "v" of `[token, head, dim]`.
  static Layout attention(std::string model, int layer_count, int head_count, int head_dim, DataType data_type,
                          int block_tokens = 64);

  /// Bytes of one block in one part: the pages of all planes and layers.
  std::int64_t block_bytes() const;
};

/// Where a plane lies: the page of (layer, block) begins at
/// `offset_bytes + layer * layer_stride_bytes + block * block_stride_bytes` from the start of the memory.
struct PlaneSpan {
  std::string name;
  std::int64_t offset_bytes = 0;
  std::int64_t layer_stride_bytes = 0;
  std::int64_t block_stride_bytes = 0;
};

/// A pool as the service describes it. Checked when received: every page lies within `size_bytes`.
struct Descriptor {
  std::string pool_id;
  std::string name;
  std::string epoch;
  std::string arena_kind;  ///< "host", "cuda_ipc" or "cuda_vmm".
  Layout layout;
  std::int64_t block_count = 0;           ///< Scratch blocks included.
  std::int64_t size_bytes = 0;            ///< Of each part.
  std::vector<PlaneSpan> spans;           ///< One a plane, in the layout's order; the same in each part.
  std::vector<std::string> part_devices;  ///< One a rank: the UUID of its device, empty for host memory.

  /// Returns where the page of (plane, layer, block) begins, in bytes from the start of any part.
  /// @throws InvalidField for a plane, layer or block that the pool does not have.
  std::int64_t page_offset_bytes(const std::string& plane, int layer, std::int64_t block) const;
  /// Returns the plane of that name. @throws InvalidField.
  const Plane& plane(const std::string& name) const;
};

}  // namespace kvharbor
