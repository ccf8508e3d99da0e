// Building the errors of errors.hpp.
#pragma once

#include <exception>
#include <string>
#include <utility>

#include "kvharbor/errors.hpp"

namespace kvharbor::detail {

// Throws a leaf that this library has found the cause of itself.
template <class Leaf>
[[noreturn]] void raise(std::string message, Metadata metadata = {}) {
  throw Leaf(Refusal{Leaf::kReason, std::move(message), std::move(metadata)});
}

// Throws InvalidField for a value that was refused before anything was sent.
[[noreturn]] inline void raise_invalid(const std::string& field, const std::string& value, const std::string& limit,
                                       const std::string& remedy) {
  raise<InvalidField>(field + " is " + value + ", must be " + limit + ": " + remedy,
                      {{"field", field}, {"value", value}, {"limit", limit}, {"remedy", remedy}});
}

}  // namespace kvharbor::detail
