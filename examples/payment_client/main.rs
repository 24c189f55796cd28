//! Starts the payment server, loses an answer, and asks again with the same key.

mod server;

use std::net::SocketAddr;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use server::{BoxError, Certificates, Options, PaymentServer, RaceServer};

#[tokio::main]
async fn main() -> Result<(), BoxError> {
    let directory = tempfile::tempdir()?;
    let server = PaymentServer::start(Options::new(directory.path().join("ledger.db"))).await?;
    println!("listening on {}", server.base_url());
    println!(
        "lost:   {:?}",
        pay(server.address(), "/payments?lose=1").await?
    );
    println!(
        "retry:  {}",
        pay(server.address(), "/payments")
            .await?
            .replace("\r\n", " | ")
    );
    println!(
        "{:?}, {} keys purged",
        server.counts().await?,
        server.purge().await?
    );
    server.stop().await;

    let certificates = Certificates::generate()?;
    println!("authority: {} bytes", certificates.authority().len());
    let race = RaceServer::start(Some(certificates.server_config())).await?;
    println!("racing on {}: {:?}", race.base_url(), race.counts());
    Ok(())
}

async fn pay(server: SocketAddr, path: &str) -> Result<String, BoxError> {
    let mut socket = TcpStream::connect(server).await?;
    let request = format!(
        "POST {path} HTTP/1.1\r\nHost: {server}\r\nIdempotency-Key: \"k1\"\r\n\
         Connection: close\r\nContent-Length: 9\r\n\r\namount=10"
    );
    socket.write_all(request.as_bytes()).await?;
    let mut answer = String::new();
    socket.read_to_string(&mut answer).await?;
    Ok(answer)
}
