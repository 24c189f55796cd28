//! Which connections carry another request, and which must not (RFC 9112 sections 6.3 and 9).

use idempool::CloseReason;

use crate::support::{
    BOTH, Peer, Scheme, builder, eventually, fetch, get, on_both_runtimes, pool, post, read,
};

/// A peer that reads a request, sends this, and goes on reading on the same connection.
fn always_sending(answer: &'static str) -> Peer {
    Peer::start(Scheme::Http, move |conn| {
        while conn.read_request().is_some() {
            conn.send(answer);
        }
    })
}

/// Sends two requests one after the other and tells how many connections that took.
async fn connections_for_two(answer: &'static str) -> (usize, idempool::Stats) {
    let peer = always_sending(answer);
    let pool = pool();
    for _ in 0..2 {
        fetch(&pool, get(&peer.url("/"))).await.expect("a response");
    }
    (peer.accepted(), pool.stats())
}

/// RFC 9112 section 9.3.
#[test]
fn a_complete_response_leaves_its_connection_for_the_next_request() {
    on_both_runtimes(|| async {
        for scheme in BOTH {
            let peer = Peer::well_behaved(scheme);
            let pool = pool();
            for _ in 0..20 {
                fetch(&pool, get(&peer.url("/"))).await.expect("a response");
            }
            let stats = pool.stats();
            assert_eq!(peer.accepted(), 1, "{scheme}");
            assert_eq!(
                (stats.connections_opened, stats.connections_saved),
                (1, 19),
                "{scheme}"
            );
            assert_eq!((stats.idle, stats.busy), (1, 0), "{scheme}");
        }
    });
}

/// RFC 9112 section 9.6 with RFC 9110 section 7.6.1: any case, any place, any line.
#[tokio::test]
async fn a_response_that_says_close_is_the_last_of_its_connection() {
    for field in [
        "close",
        "CLOSE",
        "foo, Close",
        "keep-alive,close , bar",
        "foo\r\nConnection: close",
    ] {
        let peer = Peer::start(Scheme::Http, move |conn| {
            if conn.read_request().is_some() {
                conn.reply_with(&format!("Connection: {field}\r\n"), "ok");
                conn.await_end();
            }
        });
        let pool = pool();
        for _ in 0..2 {
            fetch(&pool, get(&peer.url("/"))).await.expect("a response");
        }
        assert_eq!(peer.accepted(), 2, "{field}");
        eventually("both are closed by us", || peer.ended().len() == 2).await;
        eventually("both are counted", || {
            pool.stats().closes.get(CloseReason::ResponseSaidClose) == 2
        })
        .await;
    }
}

/// RFC 9112 section 9.6: whoever sent `close` sends no further request there, and closes.
#[tokio::test]
async fn a_request_that_says_close_is_the_last_of_its_connection() {
    let peer = Peer::well_behaved(Scheme::Http);
    let pool = pool();
    for _ in 0..2 {
        let mut request = get(&peer.url("/"));
        request
            .headers_mut()
            .insert("connection", "foo, Close".parse().unwrap());
        fetch(&pool, request).await.expect("a response");
    }
    assert_eq!(peer.accepted(), 2);
    eventually("both are closed by us", || peer.ended().len() == 2).await;
    eventually("both are counted", || {
        pool.stats().closes.get(CloseReason::RequestSaidClose) == 2
    })
    .await;
}

/// RFC 9112 sections 9.3 and C.2.2.
#[tokio::test]
async fn http_1_0_persists_only_where_it_says_so() {
    let without = "HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok";
    assert_eq!(connections_for_two(without).await.0, 2);
    let with = "HTTP/1.0 200 OK\r\nContent-Length: 2\r\nConnection: Keep-Alive\r\n\r\nok";
    assert_eq!(connections_for_two(with).await.0, 1);
}

/// RFC 9112 section 6.1: the framing of such a message is faulty.
#[tokio::test]
async fn http_1_0_with_a_transfer_coding_is_never_reused() {
    let peer = Peer::start(Scheme::Http, |conn| {
        if conn.read_request().is_some() {
            conn.send(
                "HTTP/1.0 200 OK\r\nConnection: keep-alive\r\nTransfer-Encoding: chunked\r\n\
                 Content-Length: 2\r\n\r\nok",
            );
            conn.close();
        }
    });
    let pool = pool();
    for _ in 0..2 {
        // Whether it can be read at all is hyper's business.
        if let Ok(response) = pool.send(get(&peer.url("/"))).await {
            let _ = read(response).await;
        }
    }
    assert_eq!(peer.accepted(), 2);
}

/// RFC 9112 section 9.3: the latest message decides, not an interim response.
#[tokio::test]
async fn an_interim_response_does_not_decide_about_persistence() {
    let answer = "HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n\
                  HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok";
    assert_eq!(connections_for_two(answer).await.0, 2);
    let answer = "HTTP/1.1 103 Early Hints\r\nConnection: close\r\n\r\n\
                  HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";
    assert_eq!(connections_for_two(answer).await.0, 1);
}

/// RFC 9110 section 15.2.
#[tokio::test]
async fn any_number_of_interim_responses_comes_before_the_final_one() {
    let answer = "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\n\r\n\
                  HTTP/1.1 103 Early Hints\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";
    assert_eq!(connections_for_two(answer).await.0, 1);
}

/// RFC 9112 section 6.3 rule 8.
#[tokio::test]
async fn a_response_that_ends_with_the_close_is_read_and_its_connection_not_reused() {
    let peer = Peer::start(Scheme::Http, |conn| {
        if conn.read_request().is_some() {
            conn.send("HTTP/1.1 200 OK\r\n\r\nuntil the end");
            conn.fin();
            conn.await_end();
        }
    });
    let pool = pool();
    for _ in 0..2 {
        let body = fetch(&pool, get(&peer.url("/"))).await.expect("a response");
        assert_eq!(body, "until the end");
    }
    assert_eq!(peer.accepted(), 2);
    eventually("counted", || {
        pool.stats().closes.get(CloseReason::Framing) == 2
    })
    .await;
}

/// RFC 9112 section 6.3 rule 1.
#[tokio::test]
async fn a_response_without_content_ends_at_its_head_whatever_it_declares() {
    let answers = [
        ("HEAD", "HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n"),
        (
            "HEAD",
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
        ),
        ("GET", "HTTP/1.1 204 No Content\r\n\r\n"),
        (
            "GET",
            "HTTP/1.1 304 Not Modified\r\nContent-Length: 10\r\n\r\n",
        ),
    ];
    for (method, answer) in answers {
        let peer = always_sending(answer);
        let pool = pool();
        for _ in 0..2 {
            let mut request = get(&peer.url("/"));
            *request.method_mut() = method.parse().unwrap();
            assert_eq!(fetch(&pool, request).await.expect("a response"), "");
        }
        assert_eq!(peer.accepted(), 1, "{method}: {answer}");
    }
}

/// RFC 9112 section 6.3 rule 3: it may be an attempt at smuggling.
#[tokio::test]
async fn a_response_with_length_and_coding_is_the_last_of_its_connection() {
    let answer = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n\
                  2\r\nok\r\n0\r\n\r\n";
    assert_eq!(connections_for_two(answer).await.0, 2);
}

#[tokio::test]
async fn a_chunked_response_with_trailers_leaves_its_connection() {
    let answer = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n\
                  2\r\nok\r\n0\r\nX-Check: 1\r\n\r\n";
    assert_eq!(connections_for_two(answer).await.0, 1);
}

/// The next request, sent at once after the end of a body was seen, must find the connection.
#[test]
fn a_connection_is_back_before_the_caller_sees_the_end() {
    on_both_runtimes(|| async {
        let peer = Peer::well_behaved(Scheme::Http);
        let pool = pool();
        for _ in 0..2_000 {
            fetch(&pool, get(&peer.url("/"))).await.expect("a response");
        }
        assert_eq!(peer.accepted(), 1);
    });
}

/// The most recently used one first, so that a surplus grows old and leaves.
#[tokio::test]
async fn the_connection_that_came_back_last_is_used_first() {
    let peer = Peer::well_behaved(Scheme::Http);
    let pool = pool();
    let mut held = Vec::new();
    for _ in 0..3 {
        held.push(pool.send(get(&peer.url("/"))).await.expect("a response"));
    }
    assert_eq!(peer.accepted(), 3);
    let order = [1, 2, 0];
    for index in order {
        let response = held.get_mut(index).map(std::mem::take).expect("held");
        assert_eq!(read(response).await.expect("a body"), index.to_string());
    }
    for _ in 0..3 {
        assert_eq!(
            fetch(&pool, get(&peer.url("/"))).await.expect("a response"),
            "0"
        );
    }
}

#[tokio::test]
async fn no_more_idle_connections_are_kept_than_allowed() {
    let peer = Peer::well_behaved(Scheme::Http);
    let pool = builder().max_idle_per_origin(2).build();
    let mut held = Vec::new();
    for _ in 0..5 {
        held.push(pool.send(get(&peer.url("/"))).await.expect("a response"));
    }
    for response in held {
        read(response).await.expect("a body");
    }
    assert_eq!(pool.stats().idle, 2);
    eventually("the others are closed", || {
        pool.stats().closes.get(CloseReason::IdleLimit) == 3
    })
    .await;
    // The longest idle ones went.
    assert_eq!(
        fetch(&pool, get(&peer.url("/"))).await.expect("a response"),
        "4"
    );
}

/// With reuse switched off each request has its own connection, and all still works.
#[tokio::test]
async fn a_pool_that_keeps_nothing_closes_each_connection_after_its_response() {
    for scheme in BOTH {
        let peer = Peer::well_behaved(scheme);
        let pool = builder().max_idle_per_origin(0).build();
        for _ in 0..5 {
            fetch(&pool, get(&peer.url("/"))).await.expect("a response");
        }
        assert_eq!(peer.accepted(), 5, "{scheme}");
        eventually("the server sees each end", || peer.ended().len() == 5).await;
        assert_eq!(pool.stats().idle, 0);
    }
}

/// RFC 9110 section 4.3.1: scheme, host and port.
#[tokio::test]
async fn connections_are_shared_within_an_origin_only() {
    let (one, two) = (
        Peer::well_behaved(Scheme::Http),
        Peer::well_behaved(Scheme::Http),
    );
    let pool = pool();
    let same_origin = one
        .url("/")
        .replace("http://localhost", "HTTP://user@LOCALHOST");
    for url in [
        one.url("/a"),
        two.url("/a"),
        one.url("/b?c"),
        two.url("/"),
        same_origin,
    ] {
        fetch(&pool, get(&url)).await.expect("a response");
    }
    assert_eq!((one.accepted(), two.accepted()), (1, 1));
    let by_address = format!("http://{}/", one.address());
    fetch(&pool, get(&by_address)).await.expect("a response");
    assert_eq!(one.accepted(), 2);
}

/// RFC 9112 sections 2.2 and 6: one kind of framing, and none that is not needed.
#[tokio::test]
async fn a_body_is_framed_by_its_length_where_that_is_known() {
    let peer = Peer::well_behaved(Scheme::Http);
    let pool = pool();
    fetch(&pool, post(&peer.url("/full"), "amount=10"))
        .await
        .expect("a response");
    fetch(&pool, post(&peer.url("/empty"), ""))
        .await
        .expect("a response");
    fetch(&pool, get(&peer.url("/get")))
        .await
        .expect("a response");
    let streamed = http_body_util::StreamBody::new(futures_stream(["amount", "=10"]));
    let request = http::Request::post(peer.url("/stream"))
        .body(streamed)
        .unwrap();
    read(pool.send(request).await.expect("a response"))
        .await
        .expect("a body");
    let seen: Vec<_> = peer
        .requests()
        .iter()
        .map(|request| {
            let length = request.field("content-length").map(ToOwned::to_owned);
            let coding = request.field("transfer-encoding").map(ToOwned::to_owned);
            (
                request.id(),
                length,
                coding,
                String::from_utf8(request.body.clone()).unwrap(),
            )
        })
        .collect();
    let (none, some) = (|| None, |text: &str| Some(text.to_owned()));
    let expected = [
        (
            "/full".to_owned(),
            some("9"),
            none(),
            "amount=10".to_owned(),
        ),
        ("/empty".to_owned(), some("0"), none(), String::new()),
        ("/get".to_owned(), none(), none(), String::new()),
        (
            "/stream".to_owned(),
            none(),
            some("chunked"),
            "amount=10".to_owned(),
        ),
    ];
    assert_eq!(seen, expected);
    assert_eq!(peer.accepted(), 1);
}

fn futures_stream<const N: usize>(
    parts: [&'static str; N],
) -> impl futures_util::Stream<Item = Result<http_body::Frame<bytes::Bytes>, std::convert::Infallible>>
{
    futures_util::stream::iter(
        parts.map(|part| Ok(http_body::Frame::data(bytes::Bytes::from(part)))),
    )
}

/// The request as it stands on the wire: origin form, one Host, what the caller gave and no more.
#[tokio::test]
async fn absolute_and_origin_form_give_the_same_bytes() {
    let peer = Peer::well_behaved(Scheme::Http);
    let pool = pool();
    fetch(&pool, get(&peer.url("/a?b=c")))
        .await
        .expect("a response");
    let mut request = get("/a?b=c");
    let host = format!("localhost:{}", peer.address().port());
    request.headers_mut().insert("host", host.parse().unwrap());
    fetch(&pool, request).await.expect("a response");
    let heads: Vec<_> = peer
        .requests()
        .into_iter()
        .map(|request| request.head)
        .collect();
    assert_eq!(
        heads[0],
        format!("GET /a?b=c HTTP/1.1\r\nhost: {host}\r\n\r\n")
    );
    assert_eq!(heads[0], heads[1]);
    assert_eq!(peer.accepted(), 1);
}

#[tokio::test]
async fn a_request_that_cannot_be_sent_says_so_before_any_io() {
    let pool = pool();
    let mut two_hosts = get("http://localhost/");
    two_hosts.headers_mut().append("host", "a".parse().unwrap());
    two_hosts.headers_mut().append("host", "b".parse().unwrap());
    let mut connect = get("http://localhost/");
    *connect.method_mut() = http::Method::CONNECT;
    for request in [get("/no-host"), get("ftp://localhost/"), two_hosts, connect] {
        let error = pool.send(request).await.expect_err("cannot be sent");
        assert_eq!(error.kind(), idempool::ErrorKind::InvalidRequest);
        assert_eq!(error.delivery(), idempool::Delivery::NotSent);
        assert_eq!(error.phase(), idempool::Phase::Prepare);
    }
    assert_eq!(pool.stats().connections_opened, 0);
}

/// smithy-lang/smithy-rs#4677. Head and small body in one write: 40 ms are lost where Nagle meets a delayed acknowledgement, and a head
/// that arrives alone is a request half delivered.
#[tokio::test]
async fn a_small_request_leaves_in_one_write() {
    for scheme in BOTH {
        let peer = Peer::start(scheme, |conn| {
            conn.answer_requests(1);
            while conn.read_head().is_some() {
                assert_eq!(conn.buffered(), 9, "the body came with the head");
                conn.read_body_bytes(9);
                conn.reply("ok");
            }
        });
        let pool = pool();
        for _ in 0..20 {
            fetch(&pool, post(&peer.url("/"), "amount=10"))
                .await
                .expect("a response");
        }
        assert_eq!(peer.accepted(), 1);
    }
}
