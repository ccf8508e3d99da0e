// Arrays of numbers as bytes, little-endian.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace kvharbor::detail {

inline constexpr std::size_t kTokenBytes = 4;

template <class Iterator>
std::string encoded(Iterator first, Iterator end) {
  using Number = typename std::iterator_traits<Iterator>::value_type;
  std::string bytes;
  bytes.reserve(static_cast<std::size_t>(end - first) * sizeof(Number));
  for (; first != end; ++first) {
    for (std::size_t byte = 0; byte < sizeof(Number); ++byte) {
      bytes.push_back(static_cast<char>(*first >> (8 * byte) & 0xff));
    }
  }
  return bytes;
}

// Appends as many whole numbers as there are.
template <class Number>
void decode(const std::string& bytes, std::vector<Number>& numbers) {
  numbers.reserve(numbers.size() + bytes.size() / sizeof(Number));
  for (std::size_t at = 0; at + sizeof(Number) <= bytes.size(); at += sizeof(Number)) {
    Number number = 0;
    for (std::size_t byte = 0; byte < sizeof(Number); ++byte) {
      number |= static_cast<Number>(static_cast<unsigned char>(bytes[at + byte])) << (8 * byte);
    }
    numbers.push_back(number);
  }
}

}  // namespace kvharbor::detail
