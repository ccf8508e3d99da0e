// A worker that a test drives: a command a line on stdin, its answer as a line of JSON on stdout.
//
//     kvharbor_driven_worker
//
// An answer is {"result": ...} or {"error": class, "reason": ..., "message": ..., "metadata": {...}}. Words of a
// command are separated by spaces; sequences go by names that the test gives them.
#include <kvharbor/harbor.hpp>

#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <iostream>
#include <map>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include "answers.hpp"
#include "forks.hpp"
#include "hammer.hpp"
#include "pages.hpp"
#include "words.hpp"

namespace {

using answers::answered;
using answers::listed;
using answers::numbers;
using answers::object;
using answers::quoted;
using answers::snapshot;
using forks::in_fork;
using kvharbor::Sequence;
using words::next;
using words::rest;

class Worker {
 public:
  std::string run(const std::string& line) {
    std::istringstream words(line);
    std::string operation;
    words >> operation;
    const auto found = operations_.find(operation);
    if (found == operations_.end()) throw std::invalid_argument("no operation " + operation);
    return (this->*found->second)(words);
  }

 private:
  using Operation = std::string (Worker::*)(std::istream&);

  static kvharbor::Options options(std::istream& words) {
    kvharbor::Options options;
    options.client_name = "driven-cpp";
    options.engine = {"driven", "1.0", ""};
    options.timeout = kvharbor::Milliseconds(next<int>(words));
    return options;
  }

  // connect SOCKET TIMEOUT_MS
  std::string connect(std::istream& words) {
    const auto socket = next<std::string>(words);
    harbor_ = kvharbor::Harbor::connect(socket, options(words));
    return object({{"session_id", quoted(harbor_->session_id())},
                   {"epoch", quoted(harbor_->epoch())},
                   {"join_token", quoted(harbor_->join_token())}});
  }

  // join SOCKET TIMEOUT_MS JOIN_TOKEN RANK READ_ONLY
  std::string join(std::istream& words) {
    const auto socket = next<std::string>(words);
    const auto opened = options(words);
    kvharbor::Membership membership;
    membership.join_token = next<std::string>(words);
    membership.rank = next<int>(words);
    membership.read_only = next<int>(words) != 0;
    harbor_ = kvharbor::Harbor::join(socket, membership, opened);
    return quoted(harbor_->session_id());
  }

  // open NAME MODEL TP_SIZE SIZE_BYTES: layers, heads and dims are those of the test's layout.
  std::string open(std::istream& words) {
    const auto name = next<std::string>(words);
    auto layout = kvharbor::Layout::attention(next<std::string>(words), 2, 2, 4, kvharbor::DataType::kFloat32, 16);
    layout.tp_size = next<int>(words);
    pool_ = harbor_->open_pool(name, layout, next<std::int64_t>(words));
    return object({{"pool_id", quoted(pool_->id())}, {"created", pool_->created() ? "true" : "false"}});
  }

  // attach PART, of the pool that is open.
  std::string attach(std::istream& words) {
    memory_ = pool_->attach(next<int>(words));
    return std::to_string(memory_->part());
  }

  // attach_pool POOL_ID [PART]
  std::string attach_pool(std::istream& words) {
    const auto pool_id = next<std::string>(words);
    const std::vector<int> part = rest<int>(words);
    memory_ = part.empty() ? harbor_->attach(pool_id) : harbor_->attach(pool_id, part.front());
    return std::to_string(memory_->part());
  }

  // allocate NAME RESERVE_TOKENS WAIT_MS TOKENS...
  std::string allocate(std::istream& words) {
    const auto name = next<std::string>(words);
    kvharbor::AllocateOptions asked;
    asked.reserve_tokens = next<std::int64_t>(words);
    asked.wait = kvharbor::Milliseconds(next<int>(words));
    return keep(name, pool_->allocate(rest<std::uint32_t>(words), asked));
  }

  // allocate_as NAME REQUEST_ID TOKENS...
  std::string allocate_as(std::istream& words) {
    const auto name = next<std::string>(words);
    kvharbor::AllocateOptions asked;
    asked.request_id = next<std::string>(words);
    return keep(name, pool_->allocate(rest<std::uint32_t>(words), asked));
  }

  // adopt NAME TOKEN
  std::string adopt(std::istream& words) {
    const auto name = next<std::string>(words);
    return keep(name, pool_->adopt(next<std::string>(words)));
  }

  // extend NAME TOKEN_COUNT
  std::string extend(std::istream& words) {
    Sequence& sequence = named(words);
    sequence.extend(next<std::int64_t>(words));
    return snapshot(sequence);
  }

  // commit NAME COMPUTED_TOKENS NEW_TOKENS...
  std::string commit(std::istream& words) {
    Sequence& sequence = named(words);
    const auto computed_tokens = next<std::int64_t>(words);
    return std::to_string(sequence.commit(computed_tokens, rest<std::uint32_t>(words)).committed_tokens);
  }

  // fork NAME CHILD
  std::string fork(std::istream& words) {
    Sequence& sequence = named(words);
    const auto child = next<std::string>(words);
    return keep(child, std::move(sequence.fork(1).front()));
  }

  // handoff NAME COMPUTED_TOKENS NEW_TOKENS...
  std::string handoff(std::istream& words) {
    Sequence& sequence = named(words);
    const auto computed_tokens = next<std::int64_t>(words);
    return quoted(sequence.handoff(computed_tokens, rest<std::uint32_t>(words)));
  }

  // switch NAME: and a commit that reports it.
  std::string switch_shadows(std::istream& words) {
    Sequence& sequence = named(words);
    const std::vector<int> positions = sequence.switch_shadows();
    sequence.commit(sequence.computed_tokens());
    return numbers(positions);
  }

  // release NAME: by the destructor.
  std::string release(std::istream& words) {
    sequences_.erase(next<std::string>(words));
    return "null";
  }

  // show NAME
  std::string show(std::istream& words) { return snapshot(named(words)); }

  // stamp NAME FIRST_TOKEN STAMPS...
  std::string stamp(std::istream& words) {
    Sequence& sequence = named(words);
    auto position = next<std::int64_t>(words);
    for (const float value : rest<float>(words)) pages::stamp(*memory_, sequence, position++, value);
    return "null";
  }

  // read NAME FIRST_TOKEN END_TOKEN: a stamp a token, null where its elements differ.
  std::string read(std::istream& words) {
    Sequence& sequence = named(words);
    std::vector<std::string> stamps;
    const auto first_token = next<std::int64_t>(words);
    const auto end_token = next<std::int64_t>(words);
    for (auto position = first_token; position < end_token; ++position) {
      const std::optional<float> stamp = pages::stamp_of(*memory_, sequence, position);
      std::ostringstream text;
      text.precision(9);
      if (stamp) text << *stamp;
      stamps.push_back(stamp ? text.str() : "null");
    }
    return listed(
        stamps, [](const std::string& each) { return each; }, "[]");
  }

  // fill PLANE LAYER BLOCK VALUE: a page.
  std::string fill(std::istream& words) {
    const auto plane = next<std::string>(words);
    const auto layer = next<int>(words);
    const auto block = next<std::int64_t>(words);
    const auto bytes = static_cast<std::size_t>(memory_->descriptor().plane(plane).page_bytes);
    std::fill_n(pages::to_write(*memory_, plane, layer, block), bytes / sizeof(float), next<float>(words));
    return "null";
  }

  // peek PLANE LAYER BLOCK: the first element of a page.
  std::string peek(std::istream& words) {
    const auto plane = next<std::string>(words);
    const auto layer = next<int>(words);
    return std::to_string(*pages::to_read(*memory_, plane, layer, next<std::int64_t>(words)));
  }

  // lookup TOKENS...
  std::string lookup(std::istream& words) {
    return std::to_string(pool_->lookup(rest<std::uint32_t>(words)).present_tokens);
  }

  // pin NAME TOKENS...
  std::string pin(std::istream& words) {
    const auto name = next<std::string>(words);
    return std::to_string(pool_->warmup_present(rest<std::uint32_t>(words), name).pinned_tokens);
  }

  // unpin NAME
  std::string unpin(std::istream& words) {
    pool_->unwarm(next<std::string>(words));
    return "null";
  }

  // stats
  std::string stats(std::istream&) {
    const kvharbor::PoolStats stats = pool_->stats();
    return object({{"free", std::to_string(stats.free_block_count)},
                   {"warm", std::to_string(stats.warm_block_count)},
                   {"sequences", std::to_string(stats.sequence_count)}});
  }

  // in_child: what the harbor is good for in a fork, as the child's exit status says: 0 if it is closed there.
  std::string in_child(std::istream&) {
    return std::to_string(in_fork([this] {
      try {
        pool_->stats();
        ::_exit(1);
      } catch (const kvharbor::HarborClosed&) {
      }
      sequences_.clear();
      pool_.reset();
      memory_.reset();
      harbor_.reset();
    }));
  }

  // touch_in_child: reads the pool's memory in a fork; the signal that ends it.
  std::string touch_in_child(std::istream&) {
    return std::to_string(in_fork([this] { ::_exit(*pages::to_read(*memory_, "k", 0, 0) == 0.0F ? 1 : 2); }));
  }

  // hammer THREADS ROUNDS: the tokens that were found to be right.
  std::string hammer(std::istream& words) {
    const auto thread_count = next<std::uint32_t>(words);
    return std::to_string(hammer::run(*pool_, *memory_, thread_count, next<int>(words)));
  }

  // joining: the secret for members.
  std::string joining(std::istream&) { return quoted(harbor_->join_token()); }

  // built_with_cuda
  std::string built_with_cuda(std::istream&) { return kvharbor::built_with_cuda() ? "true" : "false"; }

  // close
  std::string close(std::istream&) {
    harbor_->close();
    return "null";
  }

  Sequence& named(std::istream& words) { return sequences_.at(next<std::string>(words)); }

  std::string keep(const std::string& name, Sequence sequence) {
    sequences_.erase(name);
    return snapshot(sequences_.emplace(name, std::move(sequence)).first->second);
  }

  const std::map<std::string, Operation> operations_ = {
      {"connect", &Worker::connect},
      {"join", &Worker::join},
      {"open", &Worker::open},
      {"attach", &Worker::attach},
      {"attach_pool", &Worker::attach_pool},
      {"allocate", &Worker::allocate},
      {"allocate_as", &Worker::allocate_as},
      {"adopt", &Worker::adopt},
      {"extend", &Worker::extend},
      {"commit", &Worker::commit},
      {"fork", &Worker::fork},
      {"handoff", &Worker::handoff},
      {"switch", &Worker::switch_shadows},
      {"release", &Worker::release},
      {"show", &Worker::show},
      {"stamp", &Worker::stamp},
      {"read", &Worker::read},
      {"fill", &Worker::fill},
      {"peek", &Worker::peek},
      {"lookup", &Worker::lookup},
      {"pin", &Worker::pin},
      {"unpin", &Worker::unpin},
      {"stats", &Worker::stats},
      {"in_child", &Worker::in_child},
      {"hammer", &Worker::hammer},
      {"touch_in_child", &Worker::touch_in_child},
      {"joining", &Worker::joining},
      {"close", &Worker::close},
      {"built_with_cuda", &Worker::built_with_cuda},
  };
  std::optional<kvharbor::Harbor> harbor_;
  std::optional<kvharbor::Pool> pool_;
  std::optional<kvharbor::Memory> memory_;
  std::map<std::string, Sequence> sequences_;
};

}  // namespace

int main() {
  Worker worker;
  for (std::string line; std::getline(std::cin, line);) {
    std::cout << answered([&] { return worker.run(line); }) << std::endl;
  }
}
