// OpenSSL 3's TLS, found when it is first wanted: a daemon without TLS needs no library, a build needs no headers, and a fixed
// library is in effect after a restart. Owns the names of the functions and their types; native/tests/tls_test.cc compares them
// with OpenSSL's own headers where a host has these.
#pragma once

#include <cstddef>

struct ssl_st;
struct ssl_ctx_st;
struct ssl_method_st;
struct bio_st;
struct bio_method_st;
struct x509_st;
struct x509_store_ctx_st;
struct asn1_string_st;

namespace kv::peer {

// name, result, arguments
#define KV_OPENSSL(X)                                                                    \
  X(TLS_method, const ssl_method_st*, (void))                                            \
  X(SSL_CTX_new, ssl_ctx_st*, (const ssl_method_st*))                                    \
  X(SSL_CTX_free, void, (ssl_ctx_st*))                                                   \
  X(SSL_CTX_ctrl, long, (ssl_ctx_st*, int, long, void*))                                 \
  X(SSL_CTX_set_num_tickets, int, (ssl_ctx_st*, size_t))                                 \
  X(SSL_CTX_set_ciphersuites, int, (ssl_ctx_st*, const char*))                           \
  X(SSL_CTX_set_verify, void, (ssl_ctx_st*, int, int (*)(int, x509_store_ctx_st*)))      \
  X(SSL_CTX_load_verify_locations, int, (ssl_ctx_st*, const char*, const char*))         \
  X(SSL_CTX_use_certificate_chain_file, int, (ssl_ctx_st*, const char*))                 \
  X(SSL_CTX_use_PrivateKey_file, int, (ssl_ctx_st*, const char*, int))                   \
  X(SSL_CTX_check_private_key, int, (const ssl_ctx_st*))                                 \
  X(SSL_CTX_set_default_passwd_cb, void, (ssl_ctx_st*, int (*)(char*, int, int, void*))) \
  X(SSL_new, ssl_st*, (ssl_ctx_st*))                                                     \
  X(SSL_free, void, (ssl_st*))                                                           \
  X(SSL_set_bio, void, (ssl_st*, bio_st*, bio_st*))                                      \
  X(SSL_set_connect_state, void, (ssl_st*))                                              \
  X(SSL_set_accept_state, void, (ssl_st*))                                               \
  X(SSL_set1_host, int, (ssl_st*, const char*))                                          \
  X(SSL_set_hostflags, void, (ssl_st*, unsigned int))                                    \
  X(SSL_do_handshake, int, (ssl_st*))                                                    \
  X(SSL_read, int, (ssl_st*, void*, int))                                                \
  X(SSL_write, int, (ssl_st*, const void*, int))                                         \
  X(SSL_has_pending, int, (const ssl_st*))                                               \
  X(SSL_key_update, int, (ssl_st*, int))                                                 \
  X(SSL_get_error, int, (const ssl_st*, int))                                            \
  X(SSL_get_verify_result, long, (const ssl_st*))                                        \
  X(SSL_get1_peer_certificate, x509_st*, (const ssl_st*))                                \
  X(X509_check_host, int, (x509_st*, const char*, size_t, unsigned int, char**))         \
  X(X509_free, void, (x509_st*))                                                         \
  X(SSL_CTX_get0_certificate, x509_st*, (const ssl_ctx_st*))                             \
  X(X509_get0_notBefore, const asn1_string_st*, (const x509_st*))                        \
  X(X509_get0_notAfter, const asn1_string_st*, (const x509_st*))                         \
  X(X509_cmp_current_time, int, (const asn1_string_st*))                                 \
  X(X509_verify_cert_error_string, const char*, (long))                                  \
  X(ERR_get_error, unsigned long, (void))                                                \
  X(ERR_clear_error, void, (void))                                                       \
  X(ERR_reason_error_string, const char*, (unsigned long))                               \
  X(BIO_meth_new, bio_method_st*, (int, const char*))                                    \
  X(BIO_meth_set_write, int, (bio_method_st*, int (*)(bio_st*, const char*, int)))       \
  X(BIO_meth_set_read, int, (bio_method_st*, int (*)(bio_st*, char*, int)))              \
  X(BIO_meth_set_ctrl, int, (bio_method_st*, long (*)(bio_st*, int, long, void*)))       \
  X(BIO_new, bio_st*, (const bio_method_st*))                                            \
  X(BIO_set_data, void, (bio_st*, void*))                                                \
  X(BIO_get_data, void*, (bio_st*))                                                      \
  X(BIO_set_init, void, (bio_st*, int))                                                  \
  X(BIO_set_flags, void, (bio_st*, int))                                                 \
  X(BIO_clear_flags, void, (bio_st*, int))

struct OpenSsl {
#define X(name, result, arguments) result(*name) arguments = nullptr;
  KV_OPENSSL(X)
#undef X
};

// Throws Unavailable where the host has no OpenSSL 3.
const OpenSsl& openssl();

}  // namespace kv::peer
