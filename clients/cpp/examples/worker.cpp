// A worker on one screen: what a prompt shares with earlier ones it finds in the pool, the rest it computes in place.
// The model is a toy that writes a number made from each token; the rest is not.
//
//     kvharbor_example SOCKET
#include <kvharbor/harbor.hpp>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <iostream>
#include <string>
#include <vector>

namespace {

constexpr int kLayers = 2;
constexpr int kHeads = 2;
constexpr int kHeadDim = 8;

// One number for all elements of a token's K and V in a layer.
float number_of(std::uint32_t token, const std::string& plane, int layer) {
  return static_cast<float>(token) * (plane == "k" ? 2.0F : 3.0F) + static_cast<float>(layer);
}

// Returns where a token's [head, dim] begins. A page is [token, head, dim].
float* place_of(const kvharbor::Memory& memory, const kvharbor::Sequence& sequence, const std::string& plane, int layer,
                std::int64_t position) {
  const int block_tokens = memory.descriptor().layout.block_tokens;
  const std::uint32_t block = sequence.block_ids().at(static_cast<std::size_t>(position / block_tokens));
  auto* page = reinterpret_cast<float*>(memory.mutable_page(plane, layer, block));
  return page + position % block_tokens * (kHeads * kHeadDim);
}

// The forward pass: leaves K and V of tokens [first, end) where they belong.
void write_kv(const kvharbor::Memory& memory, const kvharbor::Sequence& sequence,
              const std::vector<std::uint32_t>& tokens, std::int64_t first) {
  for (const std::string plane : {"k", "v"}) {
    for (int layer = 0; layer < kLayers; ++layer) {
      for (auto position = first; position < static_cast<std::int64_t>(tokens.size()); ++position) {
        const float number = number_of(tokens[static_cast<std::size_t>(position)], plane, layer);
        std::fill_n(place_of(memory, sequence, plane, layer, position), kHeads * kHeadDim, number);
      }
    }
  }
}

// Whether tokens [0, end) read as they were written, whoever wrote them.
bool verified(const kvharbor::Memory& memory, const kvharbor::Sequence& sequence,
              const std::vector<std::uint32_t>& tokens, std::int64_t end) {
  for (const std::string plane : {"k", "v"}) {
    for (int layer = 0; layer < kLayers; ++layer) {
      for (std::int64_t position = 0; position < end; ++position) {
        const float* found = place_of(memory, sequence, plane, layer, position);
        const float number = number_of(tokens[static_cast<std::size_t>(position)], plane, layer);
        if (std::count(found, found + kHeads * kHeadDim, number) != kHeads * kHeadDim) return false;
      }
    }
  }
  return true;
}

void answer(const kvharbor::Pool& pool, const kvharbor::Memory& memory, std::vector<std::uint32_t> tokens) {
  kvharbor::AllocateOptions options;
  options.wait = std::chrono::seconds(5);
  kvharbor::Sequence sequence = pool.allocate(tokens, options);
  const std::int64_t cached = sequence.cached_tokens();
  const bool right = verified(memory, sequence, tokens, cached);
  write_kv(memory, sequence, tokens, cached);
  sequence.commit(static_cast<std::int64_t>(tokens.size()));

  const std::vector<std::uint32_t> generated = {7, 8, 9};
  const auto room = sequence.capacity_tokens() - sequence.token_count();
  const auto needed = static_cast<std::int64_t>(generated.size());
  if (room < needed) sequence.extend(needed - room);
  tokens.insert(tokens.end(), generated.begin(), generated.end());
  write_kv(memory, sequence, tokens, sequence.token_count());
  sequence.commit(static_cast<std::int64_t>(tokens.size()), generated);
  std::cout << tokens.size() << " tokens, " << cached << " reused and " << (right ? "right" : "WRONG") << '\n';
}  // Here the sequence is released. What is committed stays in the pool.

}  // namespace

int main(int argument_count, char** arguments) {
  if (argument_count != 2) {
    std::cerr << "usage: kvharbor_example SOCKET\n";
    return 2;
  }
  try {
    kvharbor::Options options;
    options.client_name = "toy-cpp";
    kvharbor::Harbor harbor = kvharbor::Harbor::connect(arguments[1], options);
    const auto layout = kvharbor::Layout::attention("toy-cpp@1", kLayers, kHeads, kHeadDim,
                                                    kvharbor::DataType::kFloat32, /*block_tokens=*/16);
    const kvharbor::Pool pool = harbor.open_pool("toy-cpp", layout, 64 * layout.block_bytes());
    const kvharbor::Memory memory = pool.attach();
    std::vector<std::uint32_t> prompt(100);
    for (std::size_t position = 0; position < prompt.size(); ++position) {
      prompt[position] = static_cast<std::uint32_t>(position % 26);
    }
    answer(pool, memory, prompt);
    answer(pool, memory, prompt);
    harbor.close();
  } catch (const kvharbor::HarborError& error) {
    std::cerr << error.reason() << ": " << error.what() << '\n';
    return 1;
  }
}
