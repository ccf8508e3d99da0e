// The answers of the driven worker: JSON, as far as they need it, and what its library throws.
#pragma once

#include <kvharbor/errors.hpp>
#include <kvharbor/harbor.hpp>

#include <exception>
#include <functional>
#include <map>
#include <string>
#include <vector>

namespace answers {

inline std::string quoted(const std::string& text) {
  constexpr const char* kDigits = "0123456789abcdef";
  std::string out = "\"";
  for (const char each : text) {
    const auto byte = static_cast<unsigned char>(each);
    if (each == '"' || each == '\\') {
      out.append({'\\', each});
    } else if (byte < 0x20) {
      out.append("\\u00").append({kDigits[byte >> 4], kDigits[byte & 15]});
    } else {
      out.push_back(each);
    }
  }
  return out + '"';
}

template <class Items, class Text>
std::string listed(const Items& items, Text text, const char* brackets) {
  std::string out(1, brackets[0]);
  for (const auto& each : items) {
    if (out.size() > 1) out += ", ";
    out += text(each);
  }
  return out + brackets[1];
}

template <class Number>
std::string numbers(const std::vector<Number>& values) {
  return listed(
      values, [](Number each) { return std::to_string(each); }, "[]");
}

inline std::string object(const std::map<std::string, std::string>& members) {
  return listed(
      members, [](const auto& each) { return quoted(each.first) + ": " + each.second; }, "{}");
}

inline std::string snapshot(const kvharbor::Sequence& sequence) {
  sequence.require_held();
  return object({{"id", quoted(sequence.id())},
                 {"table", numbers(sequence.block_ids())},
                 {"cached_tokens", std::to_string(sequence.cached_tokens())},
                 {"computed_tokens", std::to_string(sequence.computed_tokens())},
                 {"token_count", std::to_string(sequence.token_count())},
                 {"capacity_tokens", std::to_string(sequence.capacity_tokens())},
                 {"shadows", std::to_string(sequence.shadows().size())}});
}

inline std::string error_text(const kvharbor::HarborError& error, const std::string& group) {
  std::map<std::string, std::string> metadata;
  for (const auto& [key, value] : error.metadata()) metadata[key] = quoted(value);
  const auto retry_after = error.retry_after();
  return object({{"error", quoted(group)},
                 {"reason", quoted(error.reason())},
                 {"message", quoted(error.what())},
                 {"metadata", object(metadata)},
                 {"outcome_unknown", error.outcome_unknown() ? "true" : "false"},
                 {"retry_after_ms", retry_after ? std::to_string(retry_after->count()) : "null"}});
}

// Runs a command; returns its answer, or what it has thrown, by the class that a caller would catch.
inline std::string answered(const std::function<std::string()>& command) {
  try {
    return object({{"result", command()}});
  } catch (const kvharbor::PoolExhausted& error) {
    return error_text(error, "PoolExhausted");
  } catch (const kvharbor::LayoutMismatch& error) {
    return error_text(error, "LayoutMismatch");
  } catch (const kvharbor::CallerMistake& error) {
    return error_text(error, "CallerMistake");
  } catch (const kvharbor::StateRefused& error) {
    return error_text(error, "StateRefused");
  } catch (const kvharbor::Full& error) {
    return error_text(error, "Full");
  } catch (const kvharbor::SessionGone& error) {
    return error_text(error, "SessionGone");
  } catch (const kvharbor::Gone& error) {
    return error_text(error, "Gone");
  } catch (const kvharbor::Unavailable& error) {
    return error_text(error, "Unavailable");
  } catch (const kvharbor::HarborError& error) {
    return error_text(error, "HarborError");
  } catch (const std::exception& error) {
    return object({{"error", quoted("std::exception")}, {"message", quoted(error.what())}});
  }
}

}  // namespace answers
