/// @file
/// Token ids as calls take them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <vector>

namespace kvharbor {

/// Token ids that somebody else owns, for the length of one call: a vector, a list in braces, or a pointer and a count.
class Tokens {
 public:
  Tokens() = default;
  Tokens(const std::uint32_t* first, std::size_t count) : first_(first), count_(count) {}
  Tokens(const std::vector<std::uint32_t>& tokens) : Tokens(tokens.data(), tokens.size()) {}
  Tokens(const std::initializer_list<std::uint32_t>& tokens) : Tokens(tokens.begin(), tokens.size()) {}

  const std::uint32_t* begin() const { return first_; }
  const std::uint32_t* end() const { return first_ + count_; }
  std::size_t size() const { return count_; }

 private:
  const std::uint32_t* first_ = nullptr;
  std::size_t count_ = 0;
};

}  // namespace kvharbor
