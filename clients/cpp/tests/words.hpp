// The words of a command.
#pragma once

#include <istream>
#include <stdexcept>
#include <vector>

namespace words {

template <class Value>
Value next(std::istream& line) {
  Value value{};
  if (!(line >> value)) throw std::invalid_argument("a word is missing");
  return value;
}

template <class Value>
std::vector<Value> rest(std::istream& line) {
  std::vector<Value> values;
  for (Value value; line >> value;) values.push_back(value);
  return values;
}

}  // namespace words
