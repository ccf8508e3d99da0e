// A tensor-parallel engine of two processes: the leader makes every call, a rank only maps its part and writes there.
// What they tell each other goes through a pipe each way here; an engine has its own way.
//
//     mkfifo back
//     kvharbor_ranks SOCKET 0 < back | kvharbor_ranks SOCKET 1 > back
#include <kvharbor/harbor.hpp>

#include <algorithm>
#include <cstdint>
#include <iostream>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

constexpr int kRanks = 2;
constexpr int kLayers = 2;
constexpr int kHeads = 4;
constexpr int kHeadDim = 8;
constexpr int kBlockTokens = 16;

// What one rank computes: its heads' pages of the blocks, here full of one number.
void write_part(const kvharbor::Memory& memory, const std::vector<std::uint32_t>& blocks) {
  for (const std::string plane : {"k", "v"}) {
    for (int layer = 0; layer < kLayers; ++layer) {
      for (const std::uint32_t block : blocks) {
        auto* page = reinterpret_cast<float*>(memory.mutable_page(plane, layer, block));
        std::fill_n(page, kBlockTokens * kHeads / kRanks * kHeadDim, static_cast<float>(memory.part() + 1));
      }
    }
  }
}

void lead(const std::string& socket) {
  kvharbor::Harbor harbor = kvharbor::Harbor::connect(socket);
  // The planes are those of one rank: its share of the heads. So is the size.
  auto layout = kvharbor::Layout::attention("toy-tp@1", kLayers, kHeads / kRanks, kHeadDim,
                                            kvharbor::DataType::kFloat32, kBlockTokens);
  layout.tp_size = kRanks;
  const kvharbor::Pool pool = harbor.open_pool("toy-tp", layout, 16 * layout.block_bytes());
  const kvharbor::Memory memory = pool.attach();  // Part 0, the leader's.

  const std::vector<std::uint32_t> prompt(2 * kBlockTokens, 7);
  kvharbor::Sequence sequence = pool.allocate(prompt);
  const std::vector<std::uint32_t> blocks = sequence.block_ids();
  std::cout << harbor.join_token() << ' ' << pool.id();
  for (const std::uint32_t block : blocks) std::cout << ' ' << block;
  std::cout << std::endl;
  write_part(memory, blocks);

  std::string said;
  std::getline(std::cin, said);
  if (said != "written") throw std::runtime_error("the rank has failed");
  // For all ranks: each has written its part, and waited for its device.
  std::cerr << sequence.commit(2 * kBlockTokens).committed_tokens << " tokens committed\n";
  sequence.release();
  harbor.close();
}

void follow(const std::string& socket, int rank) {
  kvharbor::Membership membership;
  membership.rank = rank;
  std::string pool_id;
  std::cin >> membership.join_token >> pool_id;
  std::vector<std::uint32_t> blocks(2);
  for (std::uint32_t& block : blocks) std::cin >> block;

  kvharbor::Harbor harbor = kvharbor::Harbor::join(socket, membership);
  const kvharbor::Memory memory = harbor.attach(pool_id);  // The part of its rank.
  write_part(memory, blocks);
  std::cout << "written" << std::endl;
  // Stays until the leader has ended: the end of a member is the end of the session, and of what is not committed.
  for (std::string line; std::getline(std::cin, line);) continue;
}

}  // namespace

int main(int argument_count, char** arguments) {
  if (argument_count != 3) {
    std::cerr << "usage: kvharbor_ranks SOCKET RANK\n";
    return 2;
  }
  try {
    const int rank = std::stoi(arguments[2]);
    if (rank == 0) {
      lead(arguments[1]);
    } else {
      follow(arguments[1], rank);
    }
  } catch (const std::exception& error) {
    std::cerr << error.what() << '\n';
    return 1;
  }
}
