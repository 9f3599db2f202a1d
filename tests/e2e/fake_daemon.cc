// A daemon that does what its command line says, one script for each start: fake_daemon FOLDER SCRIPT -- SCRIPT -- ...
// The last script repeats. What it finds wrong ends it with 99 and a line on stderr.
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <random>
#include <sstream>
#include <string>
#include <vector>

namespace {

using Words = std::vector<std::string>;

volatile sig_atomic_t told_to_end = 0;

[[noreturn]] void wrong(const std::string& what) {
  std::fprintf(stderr, "fake_daemon: %s\n", what.c_str());
  std::_Exit(99);
}

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value != nullptr ? value : "";
}

std::multimap<std::string, int> handed() {
  std::multimap<std::string, int> out;
  if (variable("LISTEN_FDS").empty()) return out;
  if (variable("LISTEN_PID") != std::to_string(::getpid())) wrong("LISTEN_PID is " + variable("LISTEN_PID"));
  std::istringstream names(variable("LISTEN_FDNAMES"));
  int fd = 3;
  for (std::string name; std::getline(names, name, ':');) out.emplace(name, fd++);
  if (fd - 3 != std::stoi(variable("LISTEN_FDS"))) wrong("LISTEN_FDS is not the number of names");
  if (::fcntl(fd, F_GETFD) != -1) wrong("a descriptor came that nobody named");
  return out;
}

void send(const std::string& text, const std::vector<int>& fds) {
  const std::string path = variable("NOTIFY_SOCKET");
  const int out = ::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path.data(), path.size());
  iovec part{const_cast<char*>(text.data()), text.size()};
  msghdr message{};
  message.msg_name = &address;
  message.msg_namelen = sizeof address;
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  std::vector<char> control(CMSG_SPACE(fds.size() * sizeof(int)));
  if (!fds.empty()) {
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(fds.size() * sizeof(int));
    std::memcpy(CMSG_DATA(header), fds.data(), fds.size() * sizeof(int));
  }
  if (::sendmsg(out, &message, 0) < 0) wrong(std::string("sendmsg: ") + std::strerror(errno));
  ::close(out);
}

int file_of(const std::string& text) {
  const int fd = ::memfd_create("fake", MFD_CLOEXEC);
  if (fd < 0 || ::write(fd, text.data(), text.size()) != static_cast<ssize_t>(text.size())) wrong("memfd");
  return fd;
}

std::string content(int fd) {
  char text[256];
  const ssize_t got = ::pread(fd, text, sizeof text, 0);
  return got >= 0 ? std::string(text, static_cast<std::size_t>(got)) : std::strerror(errno);
}

void store(const std::string& name, const std::string& text) {
  const int fd = file_of(text);
  send("FDSTORE=1\nFDNAME=" + name + "\nFDPOLL=0\nUNKNOWN=field", {fd});
  ::close(fd);
}

// Stores one more than it was handed and is killed at once, until there are `most`, all right.
void grow(int most) {
  const auto held = handed();
  const int count = static_cast<int>(held.size());
  for (const auto& [name, fd] : held) {
    if (content(fd) != "text of " + name) wrong(name + " holds " + content(fd));
  }
  for (int i = 0; i < count; ++i) {
    if (held.count("item-" + std::to_string(i)) != 1) wrong("item-" + std::to_string(i) + " is lost");
  }
  if (count == most) std::_Exit(0);
  store("item-" + std::to_string(count), "text of item-" + std::to_string(count));
  ::kill(::getpid(), SIGKILL);
}

void many(int count) {
  for (int i = 0; i < count; ++i) store("m" + std::to_string(i), std::to_string(i));
}

void expect_many(int count) {
  const auto held = handed();
  if (static_cast<int>(held.size()) != count) wrong("not all came: " + std::to_string(held.size()));
  for (const auto& [name, fd] : held) {
    if ("m" + content(fd) != name) wrong(name + " holds " + content(fd));
  }
}

// Another process than the daemon sends.
void foreign(const std::string& name) {
  const pid_t other = ::fork();
  if (other == 0) {
    store(name, "foreign");
    ::_exit(0);
  }
  ::waitpid(other, nullptr, 0);
}

// Messages of words of the protocol and random bytes, with some descriptors, all of one open file.
void noise(std::uint64_t seed) {
  constexpr int kMessages = 2000;
  const Words words = {"FDSTORE=1", "FDSTOREREMOVE=1", "FDNAME=", "FDNAME=noise", "FDPOLL=0", "READY=1", "\n", "=",
                       "a"};
  std::mt19937_64 random(seed);
  const int fd = file_of("noise");
  for (int i = 0; i < kMessages; ++i) {
    std::string text;
    for (auto parts = random() % 12; parts > 0; --parts) {
      text +=
          random() % 3 == 0 ? std::string(random() % 600, static_cast<char>(random())) : words[random() % words.size()];
      if (random() % 2 == 0) text += '\n';
    }
    send(text, std::vector<int>(random() % 4 == 0 ? random() % 254 : 0, fd));
  }
  send("FDSTOREREMOVE=1\nFDNAME=noise", {});
  send("FDSTOREREMOVE=1\nFDNAME=stored", {});
}

// Answers each client of the passed socket with "served by PID" until it is told to end.
void serve() {
  const auto sockets = handed();
  const auto found = sockets.find("kvqd.socket");
  if (found == sockets.end()) wrong("no socket was passed");
  while (!told_to_end) {
    const int client = ::accept(found->second, nullptr, nullptr);
    if (client < 0) continue;
    const std::string text = "served by " + std::to_string(::getpid());
    (void)!::write(client, text.data(), text.size());
    ::close(client);
  }
  std::_Exit(0);
}

void wait_for_end() {
  sigset_t set;
  ::sigemptyset(&set);
  ::sigaddset(&set, SIGTERM);
  ::sigprocmask(SIG_BLOCK, &set, nullptr);
  send("READY=1", {});
  int signal = 0;
  ::sigwait(&set, &signal);
  std::_Exit(0);
}

// Goes on as another program: the words up to "end".
void become(const auto& next) {
  Words words;
  while (words.empty() || words.back() != "end") words.push_back(next());
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.back() = nullptr;
  ::execv(argv[0], argv.data());
  wrong("cannot become " + words[0]);
}

// `next` takes the command's operand.
void run(const std::string& command, const auto& next) {
  const auto pair = [](const std::string& text) {
    const auto at = text.find('=');
    return std::make_pair(text.substr(0, at), text.substr(at + 1));
  };
  if (command == "store") {
    const auto [name, text] = pair(next());
    store(name, text);
  } else if (command == "expect") {
    const auto [name, text] = pair(next());
    const auto held = handed();
    const auto found = held.find(name);
    if (found == held.end()) wrong(name + " was not handed over");
    if (content(found->second) != text) wrong(name + " holds " + content(found->second));
  } else if (command == "count") {
    const std::size_t count = std::stoul(next());
    if (handed().size() != count) wrong("handed over: " + std::to_string(handed().size()));
  } else if (command == "remove") {
    send("FDSTOREREMOVE=1\nFDNAME=" + next(), {});
  } else if (command == "raw") {
    send(next(), {});
  } else if (command == "rawfd") {
    const int fd = file_of("raw");
    send(next(), {fd});
    ::close(fd);
  } else if (command == "zero") {
    send(std::string("FDSTORE=1\0FDNAME=z", 18), {file_of("zero")});
  } else if (command == "huge") {
    send("FDSTORE=1\nFDNAME=huge\nX=" + std::string(100'000, 'x'), {file_of("huge")});
  } else if (command == "twice") {  // one open file under two names
    const int fd = file_of("twice");
    for (const char* name : {"one", "two"}) send(std::string("FDSTORE=1\nFDNAME=") + name, {fd});
  } else if (command == "noise") {
    noise(std::stoull(next()));
  } else if (command == "become") {
    become(next);
  } else if (command == "foreign") {
    foreign(next());
  } else if (command == "grow") {
    grow(std::stoi(next()));
  } else if (command == "many") {
    many(std::stoi(next()));
  } else if (command == "expect-many") {
    expect_many(std::stoi(next()));
  } else if (command == "serve") {
    serve();
  } else if (command == "wait") {
    wait_for_end();
  } else if (command == "die") {
    ::kill(::getpid(), SIGKILL);
  } else if (command == "exit") {
    std::_Exit(std::stoi(next()));
  } else {
    wrong("no such command: " + command);
  }
}

// How often it was started before, counted in the folder.
std::size_t starts(const std::string& folder) {
  const int fd = ::open((folder + "/starts").c_str(), O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
  const std::size_t before = static_cast<std::size_t>(::lseek(fd, 0, SEEK_END));
  (void)!::write(fd, "x", 1);
  ::close(fd);
  return before;
}

}  // namespace

int main(int argc, char** argv) {
  struct sigaction action {};  // without SA_RESTART: accept returns
  action.sa_handler = [](int) { told_to_end = 1; };
  ::sigaction(SIGTERM, &action, nullptr);
  std::vector<Words> scripts(1);
  for (int i = 2; i < argc; ++i) {
    if (std::string(argv[i]) == "--") {
      scripts.emplace_back();
    } else {
      scripts.back().push_back(argv[i]);
    }
  }
  const Words& script = scripts[std::min(starts(argv[1]), scripts.size() - 1)];
  for (std::size_t at = 0; at < script.size();) {
    const std::string& command = script[at++];
    run(command, [&]() -> const std::string& {
      if (at == script.size()) wrong(command + " needs an operand");
      return script[at++];
    });
  }
  wrong("the script ends without exit, die, serve or wait");
}
