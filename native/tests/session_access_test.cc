// Goal: the rule of who may attach to a namespace, and the tokens that stand for a session. Method: every kind of user against
// one pair of lists; tokens right, altered at each byte, cut, ended.
#include "core/session/session_access.h"

#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>

#include "core/session/session_tokens.h"
#include "tests/check.h"

using namespace kv;

namespace {

constexpr uint32_t kOwner = 900;

}  // namespace

TEST(rights) {
  const Tenant tenant{.readers = {{10, kUnmappedId}, {20, kUnmappedId}}, .writers = {{11}, {21}}};
  const struct {
    uint32_t uid;
    std::vector<uint32_t> groups;
    Right wanted;
  } cases[] = {
      {0, {}, Right::Write},
      {kOwner, {}, Right::Write},
      {10, {}, Right::Read},
      {11, {}, Right::Write},
      {12, {1, 2, 20}, Right::Read},
      {12, {21}, Right::Write},
      {10, {21}, Right::Write},  // both lists: the wider
      {12, {1, 2}, Right::None},
      {20, {}, Right::None},  // a user is no group
      {12, {10, 11}, Right::None},
      {12, {0, kOwner}, Right::None},  // nor is root's group root
      {kUnmappedId, {}, Right::None},
      {kUnmappedId, {20, 21}, Right::None},
      {12, {kUnmappedId}, Right::None},
  };
  for (const auto& asked : cases) CHECK(right_of({1, asked.uid, asked.groups}, tenant, kOwner) == asked.wanted);
  CHECK(right_of({1, 12, {1}}, Tenant{}, kOwner) == Right::None);
  CHECK(right_of({1, kUnmappedId, {}}, Tenant{}, kUnmappedId) == Right::Write);
}

TEST(credentials) {
  int pair[2];
  CHECK(::socketpair(AF_UNIX, SOCK_SEQPACKET, 0, pair) == 0);
  const auto who = credentials_of(pair[0]);
  if (CHECK(who.has_value())) {
    CHECK(who->pid == static_cast<uint32_t>(::getpid()) && who->uid == ::geteuid());
    CHECK(std::find(who->groups.begin(), who->groups.end(), ::getegid()) != who->groups.end());
    std::vector<gid_t> groups(static_cast<size_t>(std::max(0, ::getgroups(0, nullptr))));
    CHECK(::getgroups(static_cast<int>(groups.size()), groups.data()) == static_cast<int>(groups.size()));
    for (const gid_t group : groups) CHECK(std::find(who->groups.begin(), who->groups.end(), group) != who->groups.end());
  }
  ::close(pair[0]), ::close(pair[1]);
  CHECK(!credentials_of(-1));
}

TEST(tokens_of_sessions) {
  Tokens tokens;
  const Tokens::Token first = tokens.issue({"a", false, 1}), second = tokens.issue({"b", true, 2});
  CHECK(first != second);
  const auto found = tokens.check(second);
  CHECK(found && found->name == "b" && found->read_only);
  for (size_t at = 0; at < kTokenBytes; ++at) {
    Tokens::Token altered = first;
    altered[at] ^= 1;
    CHECK(!tokens.check(altered));
    CHECK(!tokens.check(std::span(first).first(at)));
  }
  Tokens::Token mixed = first;  // the one's number, the other's secret
  std::copy(second.begin() + 8, second.end(), mixed.begin() + 8);
  CHECK(!tokens.check(mixed) && !tokens.check({}) && !tokens.check(Tokens::Token{}));
  tokens.end(first);
  CHECK(!tokens.check(first) && tokens.check(second));
  tokens.end(first);  // once more changes nothing
  CHECK(tokens.check(second));
}
